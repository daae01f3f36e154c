use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::super::{Follower, State};
use super::service::{Answering, Service};
use super::{TestOwners, args, for_a_while, until};
use crate::cycles::yarn::Yarn;

#[derive(Clone, Debug, PartialEq)]
struct TestNode {
    memory: u64,
    cores: u64,
    label: Option<String>,
    evicts: bool,
}

#[derive(Default)]
struct Inside {
    nodes: BTreeMap<String, TestNode>,
    labels: Vec<String>,
    posts: u32,
    /// Answers everything with this.
    broken: Option<(u16, Value)>,
}

/// Answers as a ResourceManager of Hadoop 3.4.2 was observed to answer.
#[derive(Default)]
struct ResourceManager(Mutex<Inside>);

impl ResourceManager {
    /// With nodes of 12 cores, by id.
    fn new(nodes: &[(&str, Option<&str>)]) -> Arc<Self> {
        let nodes = nodes.iter().map(|(id, label)| {
            let node = TestNode {
                memory: 12_000,
                cores: 12,
                label: label.map(str::to_owned),
                evicts: false,
            };
            ((*id).to_owned(), node)
        });
        Arc::new(Self(Mutex::new(Inside {
            nodes: nodes.collect(),
            ..Inside::default()
        })))
    }

    fn node(&self, id: &str) -> TestNode {
        self.0.lock().nodes[id].clone()
    }

    fn cores(&self, id: &str) -> u64 {
        self.node(id).cores
    }

    fn label(&self, id: &str) -> Option<String> {
        self.node(id).label
    }

    /// Loses its store of labels; nodes register with their last configuration.
    fn forgets_labels(&self) {
        let mut inside = self.0.lock();
        inside.labels.clear();
        for node in inside.nodes.values_mut() {
            node.label = None;
        }
    }
}

impl Answering for ResourceManager {
    fn answer(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut inside = self.0.lock();
        if let Some(answer) = &inside.broken {
            return answer.clone();
        }
        let (path, query) = path.split_once('?').unwrap();
        assert_eq!(query, "user.name=yarn%2Dadmin");
        let path = path.strip_prefix("/ws/v1/cluster/").unwrap();
        let body: Value = serde_json::from_str(body).unwrap_or_default();
        if method == "POST" {
            inside.posts += 1;
        }
        match (method, path) {
            ("GET", "nodes") => (200, inside.listing()),
            ("POST", "add-node-labels") => {
                for label in body["nodeLabelInfo"].as_array().unwrap() {
                    assert_eq!(label["exclusivity"], "false");
                    let name = label["name"].as_str().unwrap().to_owned();
                    inside.labels.push(name);
                }
                (200, Value::Null)
            }
            ("POST", "replace-node-to-labels") => inside.replace(&body),
            ("POST", path) => {
                let id = path.strip_prefix("nodes/").unwrap();
                let id = id.strip_suffix("/resource").unwrap();
                let id = id.replace("%3A", ":").replace("%2E", ".");
                let Some(node) = inside.nodes.get_mut(&id) else {
                    return (404, json!({ "RemoteException": "is not found" }));
                };
                node.memory = body["resource"]["memory"].as_u64().unwrap();
                node.cores = body["resource"]["vCores"].as_u64().unwrap();
                node.evicts = body["overCommitTimeout"] == 0;
                (200, json!({ "resourceInfo": {} }))
            }
            other => panic!("{other:?}"),
        }
    }
}

impl Inside {
    fn listing(&self) -> Value {
        let nodes = self.nodes.iter().map(|(id, node)| {
            let mut shown = json!({
                "id": id,
                "state": "RUNNING",
                "nodeHostName": id.split(':').next(),
                // Its clock is far behind ours.
                "lastHealthUpdate": 17,
                "totalResource": { "memory": node.memory, "vCores": node.cores },
            });
            if let Some(label) = &node.label {
                shown["nodeLabels"] = json!([label]);
            }
            shown
        });
        let mut nodes: Vec<Value> = nodes.collect();
        // A lost node that is still listed.
        nodes.push(json!({
            "id": "a:9", "state": "LOST", "nodeHostName": "a", "totalResource": { "memory": 1, "vCores": 1 },
        }));
        json!({ "nodes": { "node": nodes } })
    }

    fn replace(&mut self, body: &Value) -> (u16, Value) {
        for entry in body["nodeToLabels"].as_array().unwrap() {
            let label = entry["labels"][0].as_str().map(str::to_owned);
            if let Some(label) = &label
                && !self.labels.contains(label)
            {
                return (
                    400,
                    json!({ "RemoteException": "Not all labels are known" }),
                );
            }
            let id = entry["nodeId"].as_str().unwrap();
            self.nodes.get_mut(id).unwrap().label = label;
        }
        (200, Value::Null)
    }
}

fn yarn(services: &[&Service]) -> Yarn {
    let urls: Vec<String> = services.iter().map(|it| it.url()).collect();
    Yarn::new(&urls, "yarn-admin", None, 0).unwrap()
}

fn state(directory: &Path) -> Option<State> {
    Some(State::load(directory.join("state.json")).unwrap())
}

#[tokio::test]
async fn nodes_follow_their_owners_and_those_of_others_are_left_alone() {
    let manager = ResourceManager::new(&[
        ("a:1", None),
        ("b.example.org:1", Some("gpu")),
        ("d:7", None),
        ("stranger:1", None),
    ]);
    let service = Service::start(0, manager.clone());
    let owners = TestOwners::default();
    owners.say(&[("a", 3, Some(250)), ("b", 4, Some(0)), ("c", 5, None)]);
    let directory = tempfile::tempdir().unwrap();
    let args = args(&["--server=c=d:7"]);
    let mut follower = Follower::new(
        &args,
        false,
        yarn(&[&service]),
        owners.clone(),
        state(directory.path()),
    );
    until(&mut follower, || {
        manager.cores("a:1") == 5
            && manager.cores("b.example.org:1") == 8
            && manager.label("d:7").is_some()
    })
    .await
    .unwrap();
    assert_eq!(manager.label("a:1").as_deref(), Some("harvestfs-3"));
    assert_eq!(manager.label("d:7").as_deref(), Some("harvestfs-5"));
    assert_eq!(manager.label("b.example.org:1").as_deref(), Some("gpu"));
    assert_eq!(
        (manager.cores("d:7"), manager.cores("stranger:1")),
        (12, 12)
    );
    assert_eq!(manager.label("stranger:1"), None);

    // It shrinks immediately, and excess containers are evicted.
    owners.say(&[("a", 3, Some(600)), ("b", 4, Some(0))]);
    until(&mut follower, || manager.cores("a:1") == 0)
        .await
        .unwrap();
    assert!(manager.node("a:1").evicts);
    // It grows eventually; the class changes with a new analysis.
    owners.say(&[("a", 6, Some(100)), ("b", 4, Some(0))]);
    until(&mut follower, || {
        manager.cores("a:1") == 6 && manager.label("a:1").as_deref() == Some("harvestfs-6")
    })
    .await
    .unwrap();

    // Without changes, nothing is sent.
    let posts = manager.0.lock().posts;
    for_a_while(&mut follower, Duration::from_millis(200)).await;
    assert_eq!(manager.0.lock().posts, posts);
}

#[tokio::test]
async fn a_resource_manager_that_comes_back_is_told_again() {
    let manager = ResourceManager::new(&[("a:1", None)]);
    let service = Service::start(0, manager.clone());
    let port = service.port();
    let owners = TestOwners::default();
    owners.say(&[("a", 3, Some(250))]);
    let directory = tempfile::tempdir().unwrap();
    let args = args(&[]);
    let mut follower = Follower::new(
        &args,
        false,
        yarn(&[&service]),
        owners.clone(),
        state(directory.path()),
    );
    let is_told = |cores| manager.cores("a:1") == cores && manager.label("a:1").is_some();
    until(&mut follower, || is_told(5)).await.unwrap();

    drop(service);
    for_a_while(&mut follower, Duration::from_millis(100)).await;
    manager.forgets_labels();
    owners.say(&[("a", 3, Some(500))]);
    let _service = Service::start(port, manager.clone());
    until(&mut follower, || is_told(2)).await.unwrap();

    // It answers incorrectly.
    for broken in [
        (500, json!("out of memory")),
        (200, json!("hello")),
        (200, json!({ "nodes": 3 })),
    ] {
        manager.0.lock().broken = Some(broken);
        for_a_while(&mut follower, Duration::from_millis(30)).await;
    }
    manager.0.lock().broken = None;
    owners.say(&[("a", 3, Some(600))]);
    until(&mut follower, || is_told(0)).await.unwrap();

    // One without nodes.
    manager.0.lock().broken = Some((200, json!({ "nodes": null })));
    for_a_while(&mut follower, Duration::from_millis(30)).await;
}

#[tokio::test]
async fn the_one_that_is_active_is_found() {
    let (standby, active) = (
        ResourceManager::new(&[("a:1", None)]),
        ResourceManager::new(&[("a:1", None)]),
    );
    standby.0.lock().broken = Some((307, json!("This is standby RM")));
    let services = [
        Service::start(0, standby.clone()),
        Service::start(0, active.clone()),
    ];
    let owners = TestOwners::default();
    owners.say(&[("a", 3, Some(250))]);
    let args = args(&[]);
    let directory = tempfile::tempdir().unwrap();
    let manager = yarn(&[&services[0], &services[1]]);
    let mut follower = Follower::new(&args, false, manager, owners, state(directory.path()));
    until(&mut follower, || active.cores("a:1") == 5)
        .await
        .unwrap();
    assert_eq!(standby.cores("a:1"), 12);
}

#[tokio::test]
async fn no_job_begins_where_nothing_is_heard_of_the_owner() {
    let manager = ResourceManager::new(&[("a:1", None)]);
    let service = Service::start(0, manager.clone());
    let owners = TestOwners::default();
    owners.say(&[("a", 3, Some(250))]);
    let args = args(&[]);
    let directory = tempfile::tempdir().unwrap();
    let mut follower = Follower::new(
        &args,
        false,
        yarn(&[&service]),
        owners.clone(),
        state(directory.path()),
    );
    // Its label may come after its capacity.
    let has_label = || manager.label("a:1").is_some();
    until(&mut follower, || manager.cores("a:1") == 5 && has_label())
        .await
        .unwrap();
    owners.go();
    until(&mut follower, || manager.cores("a:1") == 0)
        .await
        .unwrap();
    assert!(!manager.node("a:1").evicts, "what runs goes on");
    assert_eq!(manager.label("a:1").as_deref(), Some("harvestfs-3"));
    owners.say(&[("a", 3, Some(250))]);
    until(&mut follower, || manager.cores("a:1") == 5)
        .await
        .unwrap();
}

#[tokio::test]
async fn nodes_are_given_back_also_by_the_next_controller() {
    let manager = ResourceManager::new(&[("a:1", None), ("b:1", Some("gpu"))]);
    let service = Service::start(0, manager.clone());
    let owners = TestOwners::default();
    owners.say(&[("a", 3, Some(250)), ("b", 3, Some(0))]);
    let directory = tempfile::tempdir().unwrap();
    let stays = args(&[]);
    let mut follower = Follower::new(
        &stays,
        false,
        yarn(&[&service]),
        owners.clone(),
        state(directory.path()),
    );
    // The label is set last, and implies that the node has been shrunk.
    let is_followed = || {
        let is_labelled = manager.label("a:1").is_some();
        is_labelled && manager.cores("a:1") == 5 && manager.cores("b:1") == 8
    };
    until(&mut follower, is_followed).await.unwrap();
    drop(follower);
    assert!(is_followed(), "all stays as it was");

    // A controller without state does not touch a node that another one has shrunk.
    let elsewhere = tempfile::tempdir().unwrap();
    let mut ignorant = Follower::new(
        &stays,
        false,
        yarn(&[&service]),
        owners.clone(),
        state(elsewhere.path()),
    );
    for_a_while(&mut ignorant, Duration::from_millis(50)).await;
    assert_eq!(manager.cores("a:1"), 5);
    manager.0.lock().nodes.get_mut("b:1").unwrap().cores = 8;
    manager.0.lock().nodes.get_mut("b:1").unwrap().memory = 7_875;

    let gives_back = args(&["--restore-on-exit"]);
    let mut next = Follower::new(
        &gives_back,
        false,
        yarn(&[&service]),
        owners.clone(),
        state(directory.path()),
    );
    for_a_while(&mut next, Duration::from_millis(20)).await;
    assert_eq!((manager.cores("a:1"), manager.cores("b:1")), (12, 12));
    assert_eq!(
        (manager.label("a:1"), manager.label("b:1").as_deref()),
        (None, Some("gpu"))
    );

    // It fails, and reports that.
    drop(service);
    let error = until(&mut next, || true).await.unwrap_err();
    assert!(
        format!("{error:#}").contains("could not be given back"),
        "{error:#}"
    );
}
