//! The namenode's page in a real browser: its content, that it updates, that it logs no problems, and
//! that it can be used with a keyboard, on a narrow screen, in light and dark, and with a screen reader.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use harvestfs_tests::{Browser, Cluster, ClusterOptions, Process, can_mount, have_program, skip};

/// Script that finds texts whose contrast with their background is below that required by WCAG 2.1 (AA).
const TEXTS_OF_LITTLE_CONTRAST: &str = r#"
(() => {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let it = element; it; it = it.parentElement) {
      const color = numbers(getComputedStyle(it).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const bad = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("noscript, .hidden, .skip")) continue;
    const style = getComputedStyle(element);
    const [a, b] = [luminance(numbers(style.color)), luminance(behind(element))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < (large ? 3 : 4.5)) bad.push(`${walker.currentNode.data.trim()}: ${contrast.toFixed(2)}`);
  }
  return bad;
})()
"#;

/// Script that describes faults in the structure of the page.
const FAULTS_OF_STRUCTURE: &str = r#"
(() => {
  const faults = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  if (!document.documentElement.lang) faults.push("no language");
  if (!document.title) faults.push("no title");
  for (const [selector, count] of [["main", 1], ["h1", 1], ["header", 1], ["footer", 1]])
    if (all(selector).length !== count) faults.push(`${all(selector).length} of ${selector}`);
  let level = 0;
  for (const heading of all("h1, h2, h3, h4")) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) faults.push(`${heading.textContent}: level ${own} after ${level}`);
    level = own;
  }
  const ids = all("[id]").map((it) => it.id);
  if (new Set(ids).size !== ids.length) faults.push("an id twice");
  for (const name of ["aria-labelledby", "aria-describedby"])
    for (const it of all(`[${name}]`))
      if (!document.getElementById(it.getAttribute(name))) faults.push(`${name} to nothing`);
  for (const table of all("table"))
    if (table.rows.length && !table.querySelector("th[scope]")) faults.push("a table without headings");
  for (const it of all("a[href^='#']"))
    if (!document.getElementById(it.hash.slice(1))) faults.push(`a link to nothing: ${it.hash}`);
  return faults;
})()
"#;

fn no_strings(found: &serde_json::Value, what: &str) {
    assert_eq!(found, &serde_json::json!([]), "{what}");
}

/// axe-core, which `.ci/run` installs; skips the checks that need it if it is missing.
fn axe_core() -> Option<String> {
    let Some(path) = std::env::var_os("HARVESTFS_TESTS_AXE") else {
        skip("HARVESTFS_TESTS_AXE does not name axe.min.js (`npm install axe-core`)");
        return None;
    };
    Some(fs::read_to_string(path).expect("axe-core can be read"))
}

/// Script with which axe-core finds violations of WCAG 2.1 A and AA, and of its best practices.
const VIOLATIONS: &str = r#"
axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"] })
  .then((result) => result.violations.flatMap((rule) =>
    rule.nodes.map((node) => `${rule.id}: ${node.target}: ${node.failureSummary}`)))
"#;

fn check_accessibility(browser: &mut Browser, axe: Option<&str>) {
    if let Some(axe) = axe {
        browser.evaluate(&format!("{axe}; 0"));
        no_strings(
            &browser.evaluate(VIOLATIONS),
            "violations found by axe-core",
        );
    }
    no_strings(
        &browser.evaluate(TEXTS_OF_LITTLE_CONTRAST),
        "texts that are hard to read",
    );
    no_strings(&browser.evaluate(FAULTS_OF_STRUCTURE), "structure");
    let told = browser.accessible();
    for (role, name) in &told {
        let must_have_name = [
            "button",
            "link",
            "image",
            "img",
            "table",
            "region",
            "navigation",
        ];
        assert!(
            !must_have_name.contains(&role.as_str()) || !name.is_empty(),
            "a {role} has no name in {told:?}"
        );
    }
    for (role, name) in [("heading", "Datanodes"), ("button", "d/"), ("status", "")] {
        let found = told.iter().any(|(r, n)| r == role && n == name);
        assert!(found, "no {role} {name:?} in {told:?}");
    }
}

/// Stores a screenshot of the page, if requested.
fn keep_screenshot(browser: &mut Browser, name: &str) {
    if let Some(directory) = std::env::var_os("HARVESTFS_TESTS_SCREENSHOTS") {
        let path = PathBuf::from(directory).join(format!("{name}.png.base64"));
        fs::write(path, browser.screenshot()).expect("a screenshot");
    }
}

#[test]
fn the_page_shows_the_cluster_as_it_is_and_becomes() {
    let Some(chromium) = have_program("chromium", "apt install chromium") else {
        return;
    };
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        ..ClusterOptions::default()
    });
    let page = cluster.serve_page();
    let mount = cluster.mount("mnt");
    fs::create_dir(mount.join("d")).expect("mkdir");
    let odd = "ä b%&<i>?.bin";
    fs::write(mount.join("d").join(odd), vec![7; 3 << 20]).expect("write");
    // Blocks that are full, and so sealed.
    fs::write(mount.join("large"), vec![7; 40 << 20]).expect("write");

    let axe = axe_core();
    let mut browser = Browser::start(&chromium);
    browser.show(&page, 1280, 900, "light");
    let text = |id: &str| format!("document.getElementById('{id}').textContent");
    browser.wait_for(&format!(
        "{}.includes('all its replicas')",
        text("verdict-text")
    ));
    for number in 1..=3 {
        browser.wait_for(&format!("{}.includes('datanode-{number}')", text("nodes")));
    }
    browser.wait_for(&format!("{}.includes('3 of 3')", text("tiles")));
    browser.wait_for("document.querySelectorAll('#grid td').length === 9");
    let listed = |name: &str| {
        format!(
            "[...document.querySelectorAll('#directory button')].some((it) => it.textContent === '{name}')"
        )
    };
    browser.wait_for(&listed("d/"));
    check_accessibility(&mut browser, axe.as_deref());
    keep_screenshot(&mut browser, "light");

    // Tab reaches everything, and the focus is visible.
    let mut reached = Vec::new();
    for _ in 0..6 {
        browser.press("Tab", 9);
        let outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle");
        assert_ne!(outline, "none");
        reached.push(browser.evaluate("document.activeElement.textContent.trim().slice(0, 20)"));
    }
    assert_eq!(reached[0], "Skip to the cluster");
    assert!(
        reached.windows(2).all(|pair| pair[0] != pair[1]),
        "{reached:?}"
    );

    // With the keyboard alone: into the directory, and to the file.
    let focus = |which: &str| {
        format!(
            "[...document.querySelectorAll('#directory button')].find((it) => it.textContent === {which}).focus()"
        )
    };
    browser.evaluate(&focus("'d/'"));
    browser.press("Enter", 13);
    browser.wait_for(&listed(odd));
    browser.evaluate(&focus(&format!("'{odd}'")));
    browser.press("Enter", 13);
    browser.wait_for("document.querySelectorAll('#file .block li').length === 3");
    browser.wait_for(&format!("{}.includes('{odd}, 3.0 MiB')", text("file")));
    // Changes are visible without a reload.
    let updates = browser.evaluate("Number(document.body.dataset.updates)");
    cluster.stop(&Cluster::datanode(2));
    cluster.reimage(2);
    cluster.start_datanode(2);
    browser.wait_for(&format!(
        "{}.includes('datanode-2 came back without')",
        text("live")
    ));
    browser.wait_for(&format!("{}.includes('copied from')", text("live")));
    browser.wait_for(&format!(
        "{}.includes('all its replicas')",
        text("verdict-text")
    ));
    // This includes the file that is shown.
    browser.wait_for(
        "[...document.querySelectorAll('#file .block')]
           .every((block) => block.querySelectorAll('li').length === 3)",
    );
    browser.wait_for(&format!(
        "Number(document.body.dataset.updates) > {updates}"
    ));
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let from_elsewhere = browser.evaluate(
        "performance.getEntriesByType('resource').map((it) => it.name)
           .filter((name) => !name.startsWith(location.origin))",
    );
    no_strings(&from_elsewhere, "resources from elsewhere");

    for (width, scheme, name) in [
        (1280, "dark", "dark"),
        (360, "light", "narrow"),
        (360, "dark", "narrow-dark"),
    ] {
        browser.show(&page, width, 800, scheme);
        browser.wait_for(&format!("{}.includes('datanode-3')", text("nodes")));
        browser.wait_for(&listed("d/"));
        let overflow = browser.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth",
        );
        assert_eq!(overflow, 0, "the page is wider than a screen of {width}");
        no_strings(
            &browser.evaluate(
                "[...document.querySelectorAll('.scroll')].filter((it) => it.scrollWidth > it.clientWidth)
                   .map((it) => it.firstElementChild.id)",
            ),
            "tables that are cut off",
        );
        check_accessibility(&mut browser, axe.as_deref());
        keep_screenshot(&mut browser, name);
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());

    // The page survives the end of the namenode, reports it, and continues when the namenode is back.
    cluster.stop("namenode");
    browser.wait_for(&format!(
        "{}.includes('does not answer')",
        text("verdict-text")
    ));
    cluster.start_namenode();
    browser.wait_for(&format!(
        "{}.includes('all its replicas')",
        text("verdict-text")
    ));
}

#[test]
fn owners_at_work_denials_and_blocks_at_risk_are_shown() {
    let Some(chromium) = have_program("chromium", "apt install chromium") else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 3,
        policy: "harvest",
        ..ClusterOptions::default()
    });
    let page = cluster.serve_page();
    cluster.wait_alive(3, Duration::from_secs(60));
    cluster.output_of(&["fs", "mkdir", "/d"]);
    let source = cluster.path("source");
    fs::write(&source, vec![7; 300_000]).expect("a file");
    cluster.output_of(&["fs", "put", &source.to_string_lossy(), "/file"]);
    fs::write(cluster.path("full.csv"), "series,values\nfull,9900\n").expect("a trace");
    for number in 1..=3 {
        let full = "[primary]\nsource = \"trace\"\ntrace = \"../full.csv\"\n";
        cluster.set_primary(number, full, &[]);
    }

    // Three weeks of one of them, so that it is in a class.
    let samples = vec!["1000"; 21 * 288].join(",");
    let series = format!("series,values\nenvironment-1/function-1,{samples}\n");
    fs::write(cluster.path("cpu.csv"), series).expect("a file");
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_s = now.expect("the clock is past 1970").as_secs();
    let imported = cluster.path("cpu.csv");
    let (imported, ends) = (imported.to_string_lossy(), (now_s - 600).to_string());
    cluster.output_of(&["admin", "history", "import", &imported, "--ends", &ends]);

    let axe = axe_core();
    let mut browser = Browser::start(&chromium);
    browser.show(&page, 1280, 900, "light");
    let text = |id: &str| format!("document.getElementById('{id}').textContent");
    // Average and peak are from the history; the owner currently uses 99 %.
    browser.wait_for(
        "[...document.querySelectorAll('#classes tr td')].map((it) => it.textContent).join()
           === 'constant,1,1,10 %,10 %,99 %,1 %,1 %,1 %'",
    );
    browser.wait_for(&format!(
        "{}.includes('3 left to their owners')",
        text("tiles")
    ));
    browser.wait_for(&format!(
        "{}.includes('function-1 (environment-1)')",
        text("grid")
    ));
    browser.wait_for("document.querySelector('#grid td.busy').textContent.includes('busy')");
    // The owners' load over time, and when servers were left to them.
    for shown in ["polyline.load", "rect.denied"] {
        browser.wait_for(&format!(
            "[...document.querySelectorAll('#nodes svg.spark')].filter((it) =>
               it.ariaLabel.includes('now 99 %') && it.querySelector('{shown}')).length === 3"
        ));
    }
    let read = cluster.command(&["fs", "cat", "/file"]);
    assert!(!read.status.success(), "{read:?}");
    browser.wait_for(
        "[...document.querySelectorAll('#nodes td:nth-child(6)')].some((it) => it.textContent > 0)",
    );

    cluster.stop(&Cluster::datanode(3));
    browser.wait_for(&format!("{}.includes('2 of 3 left')", text("risk")));
    browser.wait_for(&format!("{}.includes('need them')", text("risk")));
    browser.wait_for(&format!("{}.includes('Used by /file')", text("risk")));
    browser.wait_for(&format!("{}.includes('1 with 2 left')", text("tiles")));
    browser.wait_for(&format!("{}.includes('dead')", text("nodes")));
    for scheme in ["light", "dark"] {
        browser.show(&page, 1280, 900, scheme);
        browser.wait_for(&format!("{}.includes('2 of 3 left')", text("risk")));
        browser.wait_for("document.querySelector('#directory button')");
        check_accessibility(&mut browser, axe.as_deref());
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Checks that the page has no faults.
fn check_page(browser: &mut Browser, axe: Option<&str>) {
    if let Some(axe) = axe {
        browser.evaluate(&format!("{axe}; 0"));
        no_strings(
            &browser.evaluate(VIOLATIONS),
            "violations found by axe-core",
        );
    }
    let contrast = browser.evaluate(TEXTS_OF_LITTLE_CONTRAST);
    no_strings(&contrast, "texts that are hard to read");
    no_strings(&browser.evaluate(FAULTS_OF_STRUCTURE), "structure");
}

/// The number of the namenode that leads, and its term.
fn leadership(cluster: &Cluster) -> (usize, u64) {
    let leader = cluster.leader();
    let term = cluster.group()["term"].as_u64();
    (leader, term.expect("a number"))
}

/// Waits until all that is expected of the page is true. What that is, is asked each time: on a busy machine, another
/// namenode may be elected at any time.
fn wait_for_all(browser: &mut Browser, expected: impl Fn() -> Vec<String>) {
    let end = Instant::now() + Duration::from_secs(180);
    loop {
        let mut all = expected().into_iter();
        let wrong = all.find(|it| browser.evaluate(&format!("Boolean({it})")) != true);
        let Some(wrong) = wrong else {
            return;
        };
        assert!(
            Instant::now() < end,
            "{wrong} is not true; the page says:\n{}",
            browser.evaluate("document.body.innerText")
        );
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_page_of_each_namenode_says_which_one_leads_and_what_each_lacks() {
    let Some(chromium) = have_program("chromium", "apt install chromium") else {
        return;
    };
    const NAMENODES: usize = 3;
    let mut cluster = Cluster::start(&ClusterOptions {
        namenodes: NAMENODES,
        datanodes: 3,
        ..ClusterOptions::default()
    });
    let pages: Vec<String> = (1..=NAMENODES)
        .map(|number| cluster.serve_page_of(number))
        .collect();
    cluster.wait_alive(3, Duration::from_secs(60));
    let addr = |cluster: &Cluster, number: usize| cluster.namenodes()[number - 1].to_string();
    let axe = axe_core();
    let mut browser = Browser::start(&chromium);
    let text = |id: &str| format!("document.getElementById('{id}').textContent");
    // What the table shows for a namenode: its role, and how far it is behind.
    let says = |addr: &str, part: &str, lacks: &str| {
        format!(
            "[...document.querySelectorAll('#group tr')].some((it) => it.cells[1].textContent === '{addr}'
               && it.cells[2].textContent === '{part}' && {lacks}.test(it.cells[3].textContent))"
        )
    };
    for number in 1..=NAMENODES {
        let own = addr(&cluster, number);
        browser.show(&pages[number - 1], 1280, 900, "light");
        browser.wait_for("document.querySelectorAll('#group tr').length === 3");
        browser.wait_for(&format!("{}.includes('datanode-3')", text("nodes")));
        browser.wait_for(&format!(
            "[...document.querySelectorAll('#group tr')].filter((it) =>
               it.cells[0].textContent.includes('(this one)')).map((it) => it.cells[1].textContent).join()
               === '{own}'"
        ));
        wait_for_all(&mut browser, || {
            let (leader, term) = leadership(&cluster);
            let leader_addr = addr(&cluster, leader);
            let others = (1..=NAMENODES).filter(|it| *it != leader).map(|other| {
                let is_known = number == leader || number == other;
                let lacks = if is_known {
                    "/^nothing$/"
                } else {
                    "/^unknown here$/"
                };
                says(&addr(&cluster, other), "standby", lacks)
            });
            let (verdict, part) = if number == leader {
                ("all its replicas".to_owned(), "This namenode leads")
            } else {
                let own_view = "This namenode is a standby: all below is its own view.";
                let verdict = format!("{own_view} {leader_addr} leads");
                (verdict, "This namenode is a standby")
            };
            let mut expected: Vec<String> = others.collect();
            expected.extend([
                says(&leader_addr, "leads", "/^–$/"),
                format!("{}.includes('in term {term},')", text("group-text")),
                format!("{}.includes('{verdict}')", text("verdict-text")),
                format!("{}.includes('{part}')", text("group-text")),
            ]);
            expected
        });
        check_page(&mut browser, axe.as_deref());
        keep_screenshot(&mut browser, &format!("namenode-{number}"));
    }

    // The leader's page shows how far a hung namenode is behind.
    let leader = cluster.leader();
    let standby = if leader == 1 { 2 } else { 1 };
    let standby_addr = addr(&cluster, standby);
    browser.show(&pages[leader - 1], 360, 800, "dark");
    cluster.pause(&Cluster::namenode_name(standby));
    for directory in ["/one", "/two", "/three"] {
        cluster.output_of(&["fs", "mkdir", directory]);
    }
    browser.wait_for(&says(&standby_addr, "standby", "/^[0-9]+ records?$/"));
    check_page(&mut browser, axe.as_deref());
    cluster.resume(&Cluster::namenode_name(standby));
    browser.wait_for(&says(&standby_addr, "standby", "/^nothing$/"));
    assert_eq!(browser.complaints(), Vec::<String>::new());

    // The standby's page shows the namenode that leads instead of a failed one.
    let (leader, term) = leadership(&cluster);
    let leader_addr = addr(&cluster, leader);
    let standby = if leader == 1 { 2 } else { 1 };
    browser.show(&pages[standby - 1], 1280, 900, "light");
    browser.wait_for(&says(&leader_addr, "leads", "/^–$/"));
    cluster.kill(&Cluster::namenode_name(leader));
    browser.wait_for(&format!("!({})", says(&leader_addr, "leads", "/^–$/")));
    wait_for_all(&mut browser, || {
        let next = cluster.leader();
        vec![
            says(&addr(&cluster, next), "leads", "/^–$/"),
            format!("!{}.includes('in term {term},')", text("group-text")),
        ]
    });
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// An API server with a node, a pod on harvested resources, and an unrelated one.
fn serve_kubernetes() -> SocketAddr {
    const NODES: &str = r#"{"metadata":{},"items":[{"metadata":{"name":"datanode-1","labels":{"harvestfs.io/class":"harvestfs-0"}},
        "status":{"capacity":{"cpu":"12","memory":"32Gi"},"allocatable":{}}}]}"#;
    const PODS: &str = r#"{"metadata":{},"items":[
        {"metadata":{"name":"word-count","namespace":"work"},"spec":{"nodeName":"datanode-1",
         "nodeSelector":{"harvestfs.io/class":"harvestfs-0"},"serviceAccountName":"ann",
         "containers":[{"resources":{"requests":{"harvestfs.io/cores":"3","harvestfs.io/memory-mib":"2048"}}}]}},
        {"metadata":{"name":"other","namespace":"work"},"spec":{"nodeName":"datanode-1","containers":[{}]}}]}"#;
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    // It ends with the process.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut line = String::new();
            let mut reader = BufReader::new(&mut stream);
            if reader.read_line(&mut line).is_err() {
                continue;
            }
            let mut length = 0;
            let mut header = String::new();
            while reader.read_line(&mut header).is_ok_and(|read| read > 2) {
                let lower = header.to_ascii_lowercase();
                if let Some(value) = lower.strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap_or(0);
                }
                header.clear();
            }
            let mut body = vec![0; length];
            let _ = reader.read_exact(&mut body);
            let body = match &line {
                line if line.starts_with("GET /api/v1/nodes") => NODES,
                line if line.starts_with("GET /api/v1/pods") => PODS,
                _ => "{}",
            };
            let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json";
            let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

#[test]
fn the_page_shows_what_harvested_jobs_run_where_while_a_controller_does() {
    let Some(chromium) = have_program("chromium", "apt install chromium") else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    let page = cluster.serve_page();
    cluster.wait_alive(1, Duration::from_secs(60));
    let axe = axe_core();
    let mut browser = Browser::start(&chromium);
    browser.show(&page, 1280, 900, "light");
    browser.wait_for("document.body.dataset.updates > 0");
    let shown = "!document.getElementById('jobs-section').hidden";
    browser.wait_for(&format!("!({shown})"));

    let address = format!("--api-server=http://{}", serve_kubernetes());
    let data = cluster.path("");
    let arguments = ["cycles", "kubernetes", &address, "--data"].map(Path::new);
    let arguments = [&arguments[..], &[data.as_path()]].concat();
    let log = cluster.path("controller.log");
    let controller = Process::start("controller", &arguments, &[], &log);
    browser.wait_for(shown);
    browser.wait_for(
        "[...document.querySelectorAll('#jobs tr')].map((it) => [...it.cells].map((cell) => cell.textContent).join()).join(';')
           === 'word-count,ann,harvestfs-0,1,3,2.0 GiB,datanode-1 (1)'",
    );
    browser.wait_for(
        "document.getElementById('schedulers').textContent.startsWith('Kubernetes at http://127.0.0.1:')",
    );
    for scheme in ["light", "dark"] {
        browser.show(&page, 1280, 900, scheme);
        browser.wait_for(shown);
        check_page(&mut browser, axe.as_deref());
    }
    // It reports that it ends.
    controller.stop();
    browser.wait_for(&format!("!({shown})"));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}
