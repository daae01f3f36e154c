//! A ResourceManager and NodeManagers on this machine, without HDFS.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use harvestfs_tests::{free_address, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Resources of each NodeManager. Memory is what containers request, which is more than they use.
pub const CORES: u64 = 12;
const MEMORY_MIB: u64 = 12 << 10;
/// Options of each Java process, for a fast start and little memory.
const JAVA_OPTIONS: &str =
    "-Xmx192m -Xss512k -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto";
/// How long anything may take that a Java process does for the first time.
pub const START_DEADLINE: Duration = Duration::from_secs(120);
const STOP_DEADLINE: Duration = Duration::from_secs(20);

/// A node as shown by the ResourceManager.
#[derive(Clone, Debug)]
pub struct ShownNode {
    pub cores: u64,
    pub used_cores: u64,
    pub memory_mib: u64,
    pub labels: Vec<String>,
}

/// A running Hadoop: Java, the jars, and a directory.
pub struct Hadoop {
    java_home: PathBuf,
    directory: PathBuf,
    classpath: OsString,
    web: SocketAddr,
    ports: [SocketAddr; 4],
    nodes: Vec<SocketAddr>,
    processes: Vec<Child>,
}

fn configuration(properties: &[(String, String)]) -> String {
    let mut text = "<configuration>\n".to_owned();
    for (name, value) in properties {
        let property = format!("<property><name>{name}</name><value>{value}</value></property>\n");
        text += &property;
    }
    text + "</configuration>\n"
}

impl Hadoop {
    /// Starts a ResourceManager and `nodes` NodeManagers below a directory.
    pub fn start(java: &Path, jars: &Path, directory: &Path, nodes: usize) -> Self {
        let java = fs::canonicalize(java).expect("java is there");
        let java_home = java.parent().and_then(Path::parent).expect("a home");
        let mut classpath = jars.as_os_str().to_owned();
        classpath.push("/*");
        let mut hadoop = Self {
            java_home: java_home.to_owned(),
            directory: directory.to_owned(),
            classpath,
            web: free_address(),
            ports: std::array::from_fn(|_| free_address()),
            nodes: (0..nodes).map(|_| free_address()).collect(),
            processes: Vec::new(),
        };
        hadoop.configure("conf", &[]);
        let manager = hadoop.begin(
            "conf",
            "resourcemanager",
            "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager",
        );
        hadoop.processes.push(manager);
        for number in 0..nodes {
            let name = format!("node-{number}");
            let own = |what: &str| hadoop.path(&format!("{name}/{what}")).display().to_string();
            let node = [
                ("yarn.nodemanager.address", hadoop.nodes[number].to_string()),
                (
                    "yarn.nodemanager.localizer.address",
                    free_address().to_string(),
                ),
                (
                    "yarn.nodemanager.webapp.address",
                    free_address().to_string(),
                ),
                ("yarn.nodemanager.local-dirs", own("local")),
                ("yarn.nodemanager.log-dirs", own("logs")),
            ];
            hadoop.configure(&format!("{name}/conf"), &node);
            let node = hadoop.begin(
                &format!("{name}/conf"),
                &name,
                "org.apache.hadoop.yarn.server.nodemanager.NodeManager",
            );
            hadoop.processes.push(node);
        }
        wait_until("all NodeManagers work", START_DEADLINE, || {
            (0..nodes).all(|number| hadoop.node(number).is_some())
        });
        hadoop
    }

    fn path(&self, below: &str) -> PathBuf {
        self.directory.join(below)
    }

    /// HTTP address of the ResourceManager.
    pub fn url(&self) -> String {
        format!("http://{}", self.web)
    }

    /// The id of a NodeManager.
    pub fn id(&self, number: usize) -> String {
        format!("localhost:{}", self.nodes[number].port())
    }

    fn configure(&self, name: &str, more: &[(&str, String)]) {
        let directory = self.path(name);
        fs::create_dir_all(&directory).expect("a directory");
        let own = |what: &str| self.path(what).display().to_string();
        let [scheduler, tracker, client, admin] = self.ports;
        let jars = self.classpath.display().to_string();
        let yarn: Vec<(&str, String)> = vec![
            ("yarn.resourcemanager.webapp.address", self.web.to_string()),
            (
                "yarn.resourcemanager.scheduler.address",
                scheduler.to_string(),
            ),
            (
                "yarn.resourcemanager.resource-tracker.address",
                tracker.to_string(),
            ),
            ("yarn.resourcemanager.address", client.to_string()),
            ("yarn.resourcemanager.admin.address", admin.to_string()),
            (
                "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms",
                "200".to_owned(),
            ),
            ("yarn.node-labels.enabled", "true".to_owned()),
            (
                "yarn.node-labels.fs-store.root-dir",
                format!("file://{}", own("labels")),
            ),
            // By default, this is in /tmp, and is left behind.
            (
                "yarn.node-attribute.fs-store.root-dir",
                format!("file://{}", own("attributes")),
            ),
            // Otherwise, masters of jobs without a label would find no node if all nodes have one.
            (
                "yarn.resourcemanager.node-labels.am.allow-non-exclusive-allocation",
                "true".to_owned(),
            ),
            ("yarn.nodemanager.hostname", "localhost".to_owned()),
            (
                "yarn.nodemanager.aux-services",
                "mapreduce_shuffle".to_owned(),
            ),
            ("yarn.nodemanager.resource.cpu-vcores", CORES.to_string()),
            (
                "yarn.nodemanager.resource.memory-mb",
                MEMORY_MIB.to_string(),
            ),
            ("yarn.nodemanager.vmem-check-enabled", "false".to_owned()),
            (
                "yarn.nodemanager.disk-health-checker.enable",
                "false".to_owned(),
            ),
            ("yarn.scheduler.minimum-allocation-mb", "64".to_owned()),
            // The distributed shell's master has to find the ResourceManager.
            (
                "yarn.application.classpath",
                format!("{},{jars}", own("conf")),
            ),
        ];
        let write = |file: &str, properties: &[(&str, String)]| {
            let owned = |it: &(&str, String)| (it.0.to_owned(), it.1.clone());
            let text = configuration(&properties.iter().map(owned).collect::<Vec<_>>());
            fs::write(directory.join(file), text).expect("a file");
        };
        write("yarn-site.xml", &[&yarn[..], more].concat());
        write(
            "core-site.xml",
            &[
                ("fs.defaultFS", "file:///".to_owned()),
                ("hadoop.tmp.dir", own("tmp")),
            ],
        );
        let small = |name| (name, "256".to_owned());
        write(
            "mapred-site.xml",
            &[
                ("mapreduce.framework.name", "yarn".to_owned()),
                ("mapreduce.application.classpath", jars),
                ("mapreduce.shuffle.port", "0".to_owned()),
                ("yarn.app.mapreduce.am.staging-dir", own("staging")),
                small("yarn.app.mapreduce.am.resource.mb"),
                small("mapreduce.map.memory.mb"),
                small("mapreduce.reduce.memory.mb"),
                ("mapreduce.task.io.sort.mb", "16".to_owned()),
                (
                    "yarn.app.mapreduce.am.command-opts",
                    JAVA_OPTIONS.to_owned(),
                ),
                ("mapred.child.java.opts", JAVA_OPTIONS.to_owned()),
            ],
        );
        fs::write(directory.join("capacity-scheduler.xml"), queues()).expect("a file");
        let log = "log4j.rootLogger=INFO,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n\
                   log4j.appender.out.layout=org.apache.log4j.PatternLayout\n\
                   log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n\n";
        fs::write(directory.join("log4j.properties"), log).expect("a file");
    }

    /// The words of a command that runs a class, and its environment.
    pub fn java(&self, conf: &str, class: &str) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![self.java_home.join("bin/java").into()];
        words.extend(JAVA_OPTIONS.split(' ').map(OsString::from));
        let home = self.path("home");
        fs::create_dir_all(&home).expect("a directory");
        words.push(format!("-Duser.home={}", home.display()).into());
        words.push(format!("-Djava.io.tmpdir={}", home.display()).into());
        words.push("--add-opens=java.base/java.lang=ALL-UNNAMED".into());
        words.push("-cp".into());
        let mut classpath = self.path(conf).into_os_string();
        classpath.push(":");
        classpath.push(&self.classpath);
        words.push(classpath);
        words.push(class.into());
        words
    }

    /// Environment variables that Java processes of Hadoop need.
    pub fn environment(&self, conf: &str) -> [(&'static str, PathBuf); 2] {
        [
            ("JAVA_HOME", self.java_home.clone()),
            ("HADOOP_CONF_DIR", self.path(conf)),
        ]
    }

    fn begin(&self, conf: &str, name: &str, class: &str) -> Child {
        let log = File::create(self.path(&format!("{name}.log"))).expect("a log");
        let words = self.java(conf, class);
        Command::new(&words[0])
            .args(&words[1..])
            .envs(self.environment(conf))
            .current_dir(self.path("home"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the same log"))
            .stderr(log)
            .spawn()
            .expect("java runs")
    }

    /// The ResourceManager's answer; `None` while it does not answer.
    pub fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.web).ok()?;
        let wait = Some(Duration::from_secs(5));
        stream.set_read_timeout(wait).ok()?;
        let head = format!("GET /ws/v1/cluster{path} HTTP/1.0\r\naccept: application/json\r\n\r\n");
        stream.write_all(head.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    /// All nodes; `None` for those that do not work.
    pub fn shown(&self) -> Vec<Option<ShownNode>> {
        let answer = self.get("/nodes").unwrap_or_default();
        let all = answer["nodes"]["node"].as_array();
        let find = |number| {
            let id = self.id(number);
            let node = all?.iter().find(|node| node["id"] == id.as_str())?;
            let labels = node["nodeLabels"].as_array();
            let labels = labels.into_iter().flatten();
            (node["state"] == "RUNNING").then(|| ShownNode {
                cores: node["totalResource"]["vCores"].as_u64().expect("cores"),
                used_cores: node["usedVirtualCores"].as_u64().expect("cores"),
                memory_mib: node["totalResource"]["memory"].as_u64().expect("memory"),
                labels: labels
                    .filter_map(|it| it.as_str().map(str::to_owned))
                    .collect(),
            })
        };
        (0..self.nodes.len()).map(find).collect()
    }

    /// A node, if it works.
    pub fn node(&self, number: usize) -> Option<ShownNode> {
        self.shown().swap_remove(number)
    }
}

/// Configuration of the queues, which may use the labels of the first classes, even if these do not exist yet.
fn queues() -> String {
    let mut properties = vec![
        ("root.queues".to_owned(), "default".to_owned()),
        ("root.default.capacity".to_owned(), "100".to_owned()),
        ("maximum-am-resource-percent".to_owned(), "0.9".to_owned()),
        (
            "resource-calculator".to_owned(),
            "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator".to_owned(),
        ),
    ];
    for queue in ["root", "root.default"] {
        let mut name = String::new();
        let _ = write!(name, "{queue}.accessible-node-labels");
        properties.push((name.clone(), "*".to_owned()));
        for class in 0..8 {
            properties.push((
                format!("{name}.harvestfs-{class}.capacity"),
                "100".to_owned(),
            ));
        }
    }
    for (name, _) in &mut properties {
        name.insert_str(0, "yarn.scheduler.capacity.");
    }
    configuration(&properties)
}

impl Hadoop {
    /// Kills processes that NodeManagers have left behind. Those of containers refer to directories below this one.
    fn kill_containers(&self) {
        let directory = self.directory.as_os_str().as_bytes();
        let processes = fs::read_dir("/proc").expect("it is there").flatten();
        for process in processes {
            let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let is_of_ours = line.windows(directory.len()).any(|part| part == directory);
            let pid = process.file_name().to_str().and_then(|it| it.parse().ok());
            if is_of_ours && let Some(pid) = pid.and_then(Pid::from_raw) {
                // It may have ended already.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

impl Drop for Hadoop {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["resourcemanager", "node-0", "node-1"] {
                let log = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let end = lines[lines.len().saturating_sub(15)..].join("\n");
                eprintln!("--- the end of the log of {name}:\n{end}");
            }
        }
        // NodeManagers end their containers before they end.
        for process in self.processes.iter().rev() {
            let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
            let _ = kill_process(pid.expect("a child has an id"), Signal::TERM);
        }
        let end = Instant::now() + STOP_DEADLINE;
        for process in &mut self.processes {
            while process.try_wait().expect("it is our child").is_none() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        self.kill_containers();
    }
}
