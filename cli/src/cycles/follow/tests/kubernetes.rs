use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::super::Follower;
use super::service::{Answering, Service};
use super::{TestOwners, args, until};
use crate::cycles::kubernetes::Kubernetes;

/// Has nodes of 12 cores, and shows them one at a time.
struct ApiServer(Mutex<BTreeMap<String, Value>>);

impl ApiServer {
    fn new(nodes: &[&str]) -> Arc<Self> {
        let nodes = nodes.iter().map(|name| {
            let size = json!({ "cpu": "12", "memory": "12000Mi", "pods": "110" });
            let node = json!({
                "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
                "status": { "capacity": &size, "allocatable": &size },
            });
            ((*name).to_owned(), node)
        });
        Arc::new(Self(Mutex::new(nodes.collect())))
    }

    fn offered(&self, node: &str, what: &str) -> Option<String> {
        let nodes = self.0.lock();
        let status = &nodes[node]["status"];
        let told = status["capacity"][what].as_str()?;
        (status["allocatable"][what] == told).then(|| told.to_owned())
    }

    fn class(&self, node: &str) -> Option<String> {
        let nodes = self.0.lock();
        let class = &nodes[node]["metadata"]["labels"]["harvestfs.io/class"];
        class.as_str().map(str::to_owned)
    }
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

impl Answering for ApiServer {
    fn answer(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut nodes = self.0.lock();
        let path = path.strip_prefix("/api/v1/nodes").unwrap();
        match method {
            "GET" => {
                let place = path.split_once("&continue=p%2F");
                let place: usize = place.map_or(0, |(_, place)| place.parse().unwrap());
                let more = if place + 1 < nodes.len() {
                    format!("p/{}", place + 1)
                } else {
                    String::new()
                };
                let node = nodes.values().nth(place).unwrap();
                (
                    200,
                    json!({ "metadata": { "continue": more }, "items": [node] }),
                )
            }
            "PATCH" => {
                let path = path.strip_prefix('/').unwrap();
                let (name, is_status) = match path.strip_suffix("/status") {
                    Some(name) => (name, true),
                    None => (path, false),
                };
                let patch: Value = serde_json::from_str(body).unwrap();
                let part = if is_status { "status" } else { "metadata" };
                assert_eq!(
                    patch.as_object().unwrap().keys().collect::<Vec<_>>(),
                    [part]
                );
                merge(nodes.get_mut(name).unwrap(), &patch);
                (200, json!({}))
            }
            other => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn nodes_offer_what_owners_leave() {
    let server = ApiServer::new(&["a", "b", "stranger"]);
    let service = Service::start(0, server.clone());
    let owners = TestOwners::default();
    owners.say(&[("a", 2, Some(250)), ("b", 3, None)]);
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let manager = Kubernetes::new(&service.url(), None, Some(&token));
    let args = args(&["--restore-on-exit"]);
    let mut follower = Follower::new(&args, false, manager, owners.clone(), None);
    let stop = || {
        server.offered("a", "harvestfs.io/cores").as_deref() == Some("5")
            && server.class("b").is_some()
    };
    let run = async {
        // While it runs, so that nothing is given back.
        let followed = until(&mut follower, stop);
        followed.await
    };
    run.await.unwrap();
    // Given back at the end.
    assert_eq!(
        server.offered("a", "harvestfs.io/cores").as_deref(),
        Some("0")
    );
    assert_eq!(
        server.offered("a", "harvestfs.io/memory-mib").as_deref(),
        Some("0")
    );
    assert_eq!((server.class("a"), server.class("b")), (None, None));
    assert_eq!(server.offered("stranger", "harvestfs.io/cores"), None);
    assert_eq!(server.offered("b", "harvestfs.io/cores"), None);

    // Owners need more, and the kubelet puts back what it knew.
    let stop = || server.offered("a", "harvestfs.io/cores").as_deref() == Some("2");
    owners.say(&[("a", 2, Some(500))]);
    until(&mut follower, stop).await.unwrap();
    server.0.lock().get_mut("a").unwrap()["status"]["allocatable"] = json!({});
    until(&mut follower, stop).await.unwrap();
    assert_eq!(
        server.offered("a", "cpu"),
        None,
        "only what is ours was told again"
    );
    drop(service);
    assert!(until(&mut follower, || true).await.is_err());

    std::fs::remove_file(&token).unwrap();
    let gone = Kubernetes::new("http://127.0.0.1:1", None, Some(&token));
    let mut follower = Follower::new(&args, false, gone, owners, None);
    let error = until(&mut follower, || true).await.unwrap_err();
    assert!(format!("{error:#}").contains("cannot read"), "{error:#}");
}

#[tokio::test]
async fn no_node_is_shown_to_offer_more_than_it_has() {
    let server = ApiServer::new(&["a"]);
    // What was told once is lost on one side.
    server.0.lock().get_mut("a").unwrap()["status"]["capacity"]["harvestfs.io/cores"] = json!("5");
    let service = Service::start(0, server.clone());
    let owners = TestOwners::default();
    owners.say(&[("a", 2, Some(250))]);
    let manager = Kubernetes::new(&service.url(), None, None);
    let args = args(&[]);
    let mut follower = Follower::new(&args, false, manager, owners, None);
    follower.turn().await.unwrap();
    let shown = follower.shown();
    let shown = shown.lock();
    assert_eq!((shown["a"].cores, shown["a"].memory_mib), (12, 12_000));
}
