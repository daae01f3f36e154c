// Asks the namenode once in a while and shows what it says. Nothing is ever sent that changes
// anything. Text from the cluster only gets into the page as text, never as markup.
"use strict";

const PERIOD_MS = 1000;
const HAPPENINGS_MAX = 200;
/** Of so many updates, one asks for what changes slowly and is long in a large cluster. */
const SLOWLY = 10;

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children (text or elements). */
function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 10 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

const number = (count) => count.toLocaleString("en");
const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
const percent = (permille) => `${Math.round(permille / 10)} %`;

/** A block's name, as commands and logs spell it. */
const blockName = (id) => `Block ${id.toString(16).padStart(16, "0")}`;

function duration(ms) {
  const s = Math.round(ms / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} days`;
}

function bar(part, whole, label) {
  const width = whole > 0 ? Math.min(100, (100 * part) / whole) : 0;
  return el("div", { class: "bar", role: "img", "aria-label": label },
    svg("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { width, height: 1 })));
}

/** Replaces what is in an element, unless nothing changed: the focus and the selection stay. */
function show(element, ...children) {
  const fresh = document.createElement(element.tagName);
  fresh.append(...children);
  if (fresh.innerHTML === element.innerHTML) return;
  const at = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  element.replaceChildren(...fresh.childNodes);
  if (at) element.querySelector(`[data-key="${CSS.escape(at)}"]`)?.focus();
}

// --- the cluster at a glance ---

const dead = (c) => c.nodes_known - c.nodes_alive - c.nodes_in_maintenance;

function verdict(c) {
  const own = groupVerdict(c.group);
  if (own) return own;
  if (c.recovery) {
    const names = c.recovery.ahead.map((it) => it.name).join(", ") || "no datanode that is known";
    const origin = c.recovery.is_from_backup ? "was restored from a backup up to" : "has a directory that ends at";
    return ["bad", `In recovery, nothing is changed: the namenode ${origin} record ${number(c.recovery.restored_record)}, and ${names} obeyed more. Put the newest copy back, or give up what is missing: harvestfs admin recover --accept-loss`];
  }
  if (c.refused_nodes.length > 0) return ["bad", `Two namenodes run: ${c.refused_nodes.map((it) => it.name).join(", ")} obey another one, which started later`];
  if (!c.ready) return ["warn", "Starting: the locations of blocks are still being learned"];
  const writes = c.write_trouble;
  const writesVerdict = writes && `${writes.what[0].toUpperCase()}${writes.what.slice(1)}. To do: ${writes.advice}`;
  if (writes && writes.stops_writes) return ["bad", writesVerdict];
  if (c.lost_blocks > 0) return ["bad", `${plural(c.lost_blocks, "block")} lost: no replica is known`];
  if (c.repair.held_ms !== null) return ["warn", `Many datanodes fell silent together: repair waits for ${duration(c.repair.held_ms)} at most`];
  const repair = repairVerdict(c);
  if (c.missing_by_left[1] > 0) return ["bad", `${plural(c.missing_by_left[1], "block")} down to the last replica; ${repair}`];
  if (writes) return ["warn", writesVerdict];
  if (c.under_replicated_blocks > 0) return ["warn", `${plural(c.under_replicated_blocks, "block")} without all replicas; ${repair}`];
  if (dead(c) > 0) return ["warn", `${plural(dead(c), "datanode")} dead; every block has its replicas`];
  if (c.nodes_known === 0) return ["warn", "No datanode has registered yet"];
  if (c.quarantined_blocks > 0) return ["warn", `${plural(c.quarantined_blocks, "block")} in quarantine (${bytes(c.quarantined_bytes)}): a namenode that knew more allocated them`];
  return ["good", "Every block has all its replicas"];
}

/** What repair does about the blocks that lack replicas. */
function repairVerdict(c) {
  if (c.repairs_under_way > 0) return `${plural(c.repairs_under_way, "repair")} under way`;
  const reasons = new Set(c.at_risk.filter((it) => it.left > 0).map((it) => it.why));
  if (reasons.size === 0) return "repair begins soon";
  return `none is being repaired: ${[...reasons].slice(0, 2).join("; ")}`;
}

/** How many blocks are left with how many replicas, for those that lack some. */
function missingNote([, one, two, more]) {
  const parts = [];
  if (one) parts.push(`${number(one)} with 1 left`);
  if (two) parts.push(`${number(two)} with 2 left`);
  if (more) parts.push(`${number(more)} with more left`);
  return parts.join(", ") || "none";
}

function tile(title, value, note, mood = "") {
  return el("div", { class: mood }, el("dt", {}, title), el("dd", {}, value, note ? el("small", {}, note) : null));
}

function glance(c) {
  const [mood, text] = verdict(c);
  $("verdict").className = `verdict ${mood}`;
  // A region that is read out must not change for nothing.
  if ($("verdict-text").textContent !== text) $("verdict-text").textContent = text;
  const ended = [plural(c.repairs_done, "repair")];
  if (c.repair.moves_done) ended.push(plural(c.repair.moves_done, "move"));
  if (c.repair.failed) ended.push(`${number(c.repair.failed)} failed`);
  const missing = c.missing_by_left;
  show($("tiles"),
    tile("Datanodes", `${number(c.nodes_alive)} of ${number(c.nodes_known)}`,
      c.nodes_busy ? `${number(c.nodes_busy)} left to their owners` : c.nodes_in_maintenance ? `${number(c.nodes_in_maintenance)} in maintenance` : "none busy", dead(c) > 0 ? "warn" : "good"),
    tile("Space used", bytes(c.used_bytes), `of ${bytes(c.quota_bytes)} that owners lend`),
    tile("Files", number(c.files), plural(c.directories, "directory", "directories")),
    tile("Blocks", number(c.blocks), [c.misplaced_blocks ? `${number(c.misplaced_blocks)} misplaced` : "none misplaced", ...(c.curtailed_blocks ? [`${number(c.curtailed_blocks)} with less than asked for: too few datanodes`] : [])].join(", ")),
    tile("Replicas missing", number(c.under_replicated_blocks),
      missingNote(missing),
      missing[1] ? "bad" : c.under_replicated_blocks ? "warn" : "good"),
    tile("Blocks lost", number(c.lost_blocks), c.lost_blocks ? "see blocks at risk" : "none", c.lost_blocks ? "bad" : "good"),
    tile("Repairs under way", number(c.repairs_under_way),
      c.repair.waiting ? `${number(c.repair.waiting)} wait, the first for ${duration(c.repair.oldest_ms ?? 0)}` : ended.join(", ")),
    tile("Reimages", number(c.reimages), "since the namenode started"));
  const facts = `policy ${c.policy} · ${plural(c.sessions, "session")} · up ${duration(c.uptime_s * 1000)} · ${c.version}`;
  if ($("facts").textContent !== facts) $("facts").textContent = facts;
}

// --- the namenodes that agree ---

/** What a namenode that does not lead says of the cluster is its own view, and may be old. */
function groupVerdict(group) {
  if (group.members.length < 2) return null;
  if (group.part === "nobody-leads") return ["bad", "No namenode leads, as far as this one knows: nothing is changed until most of them can reach each other. All below is this namenode's own view"];
  if (group.part === "standby") {
    const leader = group.members.find((it) => it.leads);
    return ["warn", `This namenode is a standby: all below is its own view. ${leader ? leader.addr : "Another one"} leads`];
  }
  if (group.part === "taking-over") return ["warn", "This namenode was elected, and is taking over"];
  return null;
}

const PARTS = { "leader": "leads", "taking-over": "is taking over", "standby": "is a standby", "nobody-leads": "knows of nobody that leads" };

/** Of the others, only the one that leads knows. */
function behind(member) {
  if (member.leads) return "–";
  if (member.behind_records === null) return "unknown here";
  return member.behind_records ? plural(member.behind_records, "record") : "nothing";
}

function namenodes(group) {
  $("group-section").hidden = group.members.length < 2;
  const text = `This namenode ${PARTS[group.part]}, in term ${number(group.term)}, ${group.behind_records ? `${plural(group.behind_records, "record")} behind what is committed` : "and has all that is committed"}.`;
  if ($("group-text").textContent !== text) $("group-text").textContent = text;
  show($("group"), ...group.members.map((it) => el("tr", {},
    el("th", { scope: "row" }, `${number(it.number)}${it.is_this ? " (this one)" : ""}`),
    el("td", {}, it.addr),
    el("td", {}, it.leads ? "leads" : group.part === "nobody-leads" ? "unknown" : "standby"),
    el("td", {}, behind(it)))));
}

// --- the grid ---

const ROWS = ["low peaks", "medium peaks", "high peaks"];
const COLUMNS = ["rarely reimaged", "sometimes reimaged", "often reimaged"];
const cellName = (it) => (it ? `${ROWS[it.row]}, ${COLUMNS[it.column]}` : "outside the grid");
const sameCell = (a, b) => a && b && a.row === b.row && a.column === b.column;
const state = (node) => (node.maintenance_left_ms !== null ? "maintenance" : !node.alive ? "dead" : node.busy ? "busy" : "good");

function cell(report, c) {
  if (report.servers === 0) return el("td", { class: "empty" }, el("div", { class: "place-name" }, "no server"));
  const nodes = c.nodes.filter((node) => sameCell(node.cell, report.cell));
  const busy = nodes.filter((node) => node.alive && node.busy);
  // Placement counts in whole blocks: what is really used is better summed up, where all are shown.
  const all = c.nodes.length >= c.nodes_known;
  const volumes = nodes.filter((node) => node.alive).flatMap((node) => node.volumes);
  const quota = all ? volumes.reduce((sum, it) => sum + it.quota_bytes, 0) : report.capacity_bytes;
  const used = all ? volumes.reduce((sum, it) => sum + it.used_bytes, 0) : report.capacity_bytes - report.free_bytes;
  const tenants = c.tenants.filter((tenant) => sameCell(tenant.cell, report.cell));
  const names = tenants.slice(0, 3).map((it) => `${it.tenant.machine_function} (${it.tenant.environment})`);
  if (tenants.length > 3) names.push(`${number(tenants.length - 3)} more`);
  const dots = nodes.slice(0, 60).map((node) =>
    el("li", { class: state(node), title: `${node.server.name}: ${state(node) === "good" ? "free" : state(node)}` }));
  return el("td", { class: busy.length ? "busy" : "" },
    el("div", { class: "space" }, `${bytes(used)} of ${bytes(quota)}`),
    bar(used, quota, `${bytes(used)} used of ${bytes(quota)}`),
    el("ul", { class: "dots", "aria-hidden": "true" }, ...dots),
    el("div", {}, `${plural(report.servers, "server")}${busy.length ? `, ${number(busy.length)} busy` : ""}`),
    el("div", { class: "place-name" }, names.join(", ")));
}

function grid(c) {
  const corner = el("th", { scope: "col" }, el("span", { class: "hidden" }, "Peaks"));
  const head = el("thead", {}, el("tr", {}, corner, ...COLUMNS.map((name) => el("th", { scope: "col" }, name))));
  const rows = ROWS.map((name, row) => {
    const cells = c.cells.filter((it) => it.cell && it.cell.row === row);
    return el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((report, column) => {
      const it = cell(report, c);
      it.dataset.label = COLUMNS[column];
      return it;
    }));
  });
  show($("grid"), head, el("tbody", {}, ...rows));
  const outside = c.cells.find((it) => !it.cell);
  const text = outside && outside.servers
    ? `Outside the grid: ${plural(outside.tenants, "tenant")} on ${plural(outside.servers, "server")}, ${bytes(outside.free_bytes)} free.`
    : "No tenant is outside the grid.";
  if ($("outside").textContent !== text) $("outside").textContent = text;
}

function diversity(c) {
  const most = Math.max(1, ...c.blocks_by_score);
  const lines = c.blocks_by_score.map((count, score) =>
    el("li", {}, el("span", {}, `${score} of 5`), bar(count, most, plural(count, "block")), el("span", { class: "count" }, number(count))));
  show($("diversity"), el("ul", { class: "scores" }, ...lines.reverse()));
}

// --- datanodes ---

/** The owner's load: a line for what is known, shaded where the server was left to it. */
function spark(node) {
  const width = 180;
  const height = 30;
  const loads = node.loads;
  if (loads.length === 0) return el("span", { class: "quiet" }, "nothing heard yet");
  if (!node.primary && loads.every((point) => point.cpu_permille === null && !point.busy)) {
    return el("span", { class: "quiet" }, "not measured");
  }
  const end = loads[loads.length - 1].at_s;
  const x = (point) => width - (end - point.at_s) / 10;
  const y = (point) => height - 1 - (Math.min(point.cpu_permille, 1000) / 1000) * (height - 3);
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  const known = loads.filter((point) => point.cpu_permille !== null);
  const now = node.primary ? percent(node.primary.cpu_permille) : "not known";
  const peak = known.length ? percent(Math.max(...known.map((point) => point.cpu_permille))) : "not known";
  picture.setAttribute("aria-label", `CPU of the owner: now ${now}, peak ${peak}; busy for ${plural(loads.filter((point) => point.busy).length * 10, "second")} of the last half hour`);
  for (const point of loads.filter((it) => it.busy)) {
    picture.append(svg("rect", { class: "denied", x: x(point) - 1, y: 0, width: 1.2, height }));
  }
  picture.append(svg("line", { class: "base", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }));
  if (known.length) {
    const line = known.map((point) => `${x(point).toFixed(1)},${y(point).toFixed(1)}`);
    picture.append(svg("polygon", { class: "area", points: `${x(known[0]).toFixed(1)},${height} ${line.join(" ")} ${width},${height}` }));
    picture.append(svg("polyline", { class: "load", points: line.join(" ") }));
  }
  return el("div", { class: "load" }, picture, el("span", {}, node.primary ? now : "–"));
}

const STATES = { good: ["good", "free"], busy: ["warn", "owner's"], dead: ["bad", "dead"], maintenance: ["warn", "maintenance"] };

function nodeRow(node) {
  const [mood, word] = STATES[state(node)];
  const quota = node.volumes.reduce((sum, volume) => sum + volume.quota_bytes, 0);
  const used = node.volumes.reduce((sum, volume) => sum + volume.used_bytes, 0);
  const broken = node.volumes.filter((volume) => !volume.healthy).length;
  const repair = [];
  if (node.repairs_to) repair.push(`receives ${number(node.repairs_to)}`);
  if (node.repairs_from) repair.push(`serves ${number(node.repairs_from)}`);
  if (node.draining) repair.push("is drained");
  if (node.maintenance_left_ms !== null) repair.push(`may be away for ${duration(node.maintenance_left_ms)}`);
  return el("tr", {},
    el("th", { scope: "row" }, node.server.name, el("div", { class: "quiet" }, `${node.server.machine_function} · ${node.server.environment} · ${node.server.rack}`)),
    el("td", { "data-label": "State" }, el("span", { class: `pill ${mood}` }, word), broken ? el("div", { class: "quiet" }, `${plural(broken, "volume")} down`) : null),
    el("td", { "data-label": "Owner's CPU" }, spark(node)),
    el("td", { class: "number", "data-label": "Used" }, `${bytes(used)} of ${bytes(quota)}`, bar(used, quota, `${bytes(used)} used of ${bytes(quota)}`)),
    el("td", { class: "number", "data-label": "Replicas" }, number(node.replicas)),
    el("td", { class: "number", "data-label": "Denials" }, number(node.denials)),
    el("td", { "data-label": "Repair" }, repair.join(", ") || "–"),
    el("td", { "data-label": "Cell" }, cellName(node.cell)));
}

function nodes(c) {
  show($("nodes"), ...c.nodes.map(nodeRow));
}

// --- blocks at risk, and where blocks are ---

function replica(place) {
  const notes = [place.rack, cellName(place.cell)];
  if (place.state !== "sealed") notes.push(place.state);
  if (place.leaving) notes.push("leaving");
  return el("li", { class: place.state === "gone" ? "missing" : "" }, place.server, el("small", {}, notes.join(" · ")));
}

function block(place, title, ...notes) {
  const lacks = place.given_up.concat(place.possible < place.replication ? [plural(place.replication - place.possible, "replica")] : []);
  const few = lacks.length ? el("p", { class: "quiet" }, `The cluster does not have the datanodes for: ${lacks.join(", ")}`) : null;
  const broken = place.broken.length ? el("p", { class: "quiet" }, `Does not keep apart: ${place.broken.join(", ")}`) : null;
  const replicas = place.replicas.length ? el("ul", {}, ...place.replicas.map(replica)) : null;
  return el("div", { class: "block" }, el("h3", {}, title), ...notes, broken, few, replicas);
}

function risk(c) {
  if (c.at_risk.length === 0) {
    show($("risk"), el("p", { class: "quiet" }, "No block has fewer replicas than it should."));
    return;
  }
  const pill = (it) => el("span", { class: `pill ${it.left <= 1 ? "bad" : "warn"}` }, it.left === 0 ? "none left" : `${it.left} of ${it.wanted} left`);
  const why = (it) => `${it.why}${it.waits_ms === null ? "" : ` (for ${duration(it.waits_ms)})`}`;
  nameUsers(c.at_risk.map((it) => it.block));
  show($("risk"), ...c.at_risk.map((it) => block(it.place, blockName(it.block), el("p", {}, pill(it), " ", why(it)), usersNote(it.block))));
}

/** Paths of the files that use blocks at risk; null: the namespace is too large to look each time. */
let users = new Map();
let usersAt = 0;

function usersNote(id) {
  if (users === null) return el("p", { class: "quiet" }, "Which files use it: harvestfs admin fsck");
  const paths = users.get(id);
  if (paths === undefined) return null;
  return el("p", {}, paths.length ? `Used by ${paths.join(", ")}` : "Used by files that have no name any more");
}

/** Looks up what is not known yet, at most every ten seconds: the namenode goes through all files. */
async function nameUsers(blocks) {
  const unknown = users !== null && blocks.some((id) => !users.has(id));
  if (!unknown || Date.now() - usersAt < 10 * PERIOD_MS) return;
  usersAt = Date.now();
  try {
    const found = await ask(`/api/users?blocks=${blocks.join(",")}`);
    users = found && new Map(blocks.map((id) => [id, found.filter((it) => it.block === id).map((it) => it.path)]));
  } catch {
    // It is asked again.
  }
}

// --- live ---

const KINDS = {
  reimage: ["bad", "reimage"], death: ["bad", "dead"], loss: ["bad", "lost"], held: ["warn", "waiting"],
  released: ["good", "goes on"], repair: ["good", "repaired"], move: ["plain", "moved"], failure: ["warn", "failed"],
};
let happenings = [];
let uptime_s = 0;
let turn = 0;

function live(c) {
  happenings = happenings.concat(c.happenings).slice(-HAPPENINGS_MAX);
  if (happenings.length === 0) {
    show($("live"), el("li", {}, el("span", { class: "quiet" }, "quiet")));
    return;
  }
  show($("live"), ...happenings.toReversed().map((it) => {
    const [mood, word] = KINDS[it.kind] ?? ["plain", it.kind];
    const at = new Date(it.at_s * 1000);
    return el("li", {}, el("time", { datetime: at.toISOString() }, at.toLocaleTimeString("en-GB")), el("span", { class: `pill ${mood}` }, word), el("span", {}, it.what));
  }));
}

// --- files ---

/** The names of the directories down to the one that is shown, as the namenode spells them. */
let path = [];
let listed = [];
/** The names down to the file that was chosen, and what the namenode said of it; null: none is. */
let chosen = null;
let chosenText = "";

const link = (names) => names.map((name) => `%2F${name.link}`).join("") || "%2F";

async function ask(url) {
  const response = await fetch(url, { credentials: "same-origin" });
  if (!response.ok) throw new Error((await response.text()).trim());
  return response.json();
}

function button(text, key, action) {
  const it = el("button", { type: "button", "data-key": key }, text);
  it.addEventListener("click", action);
  return it;
}

function complain(element, error) {
  element.replaceChildren(el("p", { class: "quiet" }, `That does not work: ${error.message}`));
}

function crumbs() {
  const parts = [button("/", "crumb", () => enter([]))];
  path.forEach((name, depth) => {
    parts.push(button(name.name, `crumb${depth}`, () => enter(path.slice(0, depth + 1))), document.createTextNode("/"));
  });
  $("path").replaceChildren(...parts);
}

async function enter(names) {
  path = names;
  listed = [];
  chosen = null;
  crumbs();
  $("file").replaceChildren(el("p", { class: "quiet" }, "Choose a file to see where its replicas are."));
  await list();
}

async function list() {
  const after = listed.length ? `&after=${listed[listed.length - 1].link}` : "";
  try {
    const page = await ask(`/api/directory?path=${link(path)}${after}`);
    listed = listed.concat(page.entries);
    const rows = listed.map((entry) => {
      const here = [...path, entry];
      const name = entry.kind === "directory" ? button(`${entry.name}/`, entry.link, () => enter(here))
        : entry.kind === "file" ? button(entry.name, entry.link, () => choose(here)) : el("span", {}, entry.name);
      return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number" }, entry.kind === "file" ? bytes(entry.size_bytes) : ""));
    });
    const table = el("table", { "aria-label": "Entries" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Name"), el("th", { scope: "col" }, "Size"))), el("tbody", {}, ...rows));
    $("directory").replaceChildren(rows.length ? table : el("p", { class: "quiet" }, "Nothing is in this directory."));
    if (page.more) $("directory").append(button("Show more", "more", list));
  } catch (error) {
    complain($("directory"), error);
  }
}

async function choose(names) {
  chosen = names;
  chosenText = "";
  await places();
}

/** Where the replicas of the file that is shown are now. */
async function places() {
  const names = chosen;
  if (names === null) return;
  try {
    const file = await ask(`/api/file?path=${link(names)}`);
    const text = JSON.stringify(file);
    if (names !== chosen || text === chosenText) return;
    chosenText = text;
    const blocks = file.blocks.map((place) => block(place, blockName(place.block),
      el("p", { class: "quiet" }, `${place.held.length} of 5 constraints hold · ${place.strict ? "strict" : "space before distance"} · ${plural(place.replication, "replica")} wanted`)));
    $("file").replaceChildren(el("h3", {}, `${names[names.length - 1].name}, ${bytes(file.size_bytes)}`),
      ...(blocks.length ? blocks : [el("p", { class: "quiet" }, "It has no blocks: it is empty, or all holes.")]));
  } catch (error) {
    if (names !== chosen) return;
    chosenText = "";
    complain($("file"), error);
  }
}

// --- utilisation classes ---

/** There is no table before the first analysis. */
async function classes() {
  const all = (await ask("/classes")).classes;
  const share = (permille) => (permille === null || permille === undefined ? "–" : percent(permille));
  $("classes-section").hidden = all.length === 0;
  show($("classes"), ...all.map((it) => el("tr", {},
    el("th", { scope: "row" }, String(it.class)),
    el("td", {}, it.pattern),
    el("td", {}, number(it.tenants.length)),
    el("td", {}, number(it.servers.length)),
    el("td", {}, percent(it.average_cpu_permille)),
    el("td", {}, percent(it.peak_cpu_permille)),
    el("td", {}, share(it.cpu_permille)),
    el("td", {}, share(it.headroom?.short_permille)),
    el("td", {}, share(it.headroom?.medium_permille)),
    el("td", {}, share(it.headroom?.long_permille)))));
}

// --- harvested jobs ---

/** Servers of a job that are named; the others are counted. */
const PLACES_SHOWN = 8;
const MIB = 1024 * 1024;

function where(job) {
  const named = job.places.slice(0, PLACES_SHOWN).map((it) => `${it.server} (${number(it.containers)})`);
  const more = job.places.length - named.length;
  return [...named, ...(more > 0 ? [`and ${number(more)} more`] : [])].join(", ") || "not known";
}

function scheduler(it) {
  const offers = it.offers.map((offer) =>
    `${offer.label ?? "no label"}: ${plural(offer.cores, "core")} and ${bytes(offer.memory_mib * MIB)} on ${plural(offer.nodes, "node")}`);
  const left = it.jobs_left_out ? `; ${plural(it.jobs_left_out, "job")} more` : "";
  return el("p", {}, `${it.scheduler}: ${plural(it.jobs.length, "job")}${left}. Offered are ${offers.join("; ") || "no nodes"}.`);
}

/** There is nothing while no controller reports. */
function jobs(c) {
  $("jobs-section").hidden = c.schedulers.length === 0;
  show($("schedulers"), ...c.schedulers.map(scheduler));
  const sum = (job, of) => job.places.reduce((all, it) => all + it[of], 0);
  show($("jobs"), ...c.schedulers.flatMap((it) => it.jobs).map((job) => el("tr", {},
    el("th", { scope: "row" }, job.name || job.id),
    el("td", {}, job.user || "–"),
    el("td", {}, job.label ?? "–"),
    el("td", {}, number(sum(job, "containers"))),
    el("td", {}, number(sum(job, "cores"))),
    el("td", {}, bytes(sum(job, "memory_mib") * MIB)),
    el("td", {}, where(job)))));
}

// --- again and again ---

async function update() {
  const last = happenings.length ? happenings[happenings.length - 1].number : 0;
  try {
    let c = await ask(`/api/cluster?since=${last}`);
    if (c.uptime_s < uptime_s) {
      // It was restarted, and counts happenings from the start again.
      happenings = [];
      c = await ask("/api/cluster");
    }
    uptime_s = c.uptime_s;
    document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
    glance(c);
    namenodes(c.group);
    grid(c);
    diversity(c);
    nodes(c);
    risk(c);
    jobs(c);
    live(c);
    if (turn++ % SLOWLY === 0) await classes();
  } catch (error) {
    $("verdict").className = "verdict bad";
    $("verdict-text").textContent = `The namenode does not answer (${error.message}); trying again`;
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) {
      await update();
      await places();
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

watch();
enter([]);
