//! A Prometheus server that scrapes a cluster.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::{free_address, wait_until};

/// Maximum time to start and to scrape every part.
const DEADLINE: Duration = Duration::from_secs(60);

/// A part to scrape.
#[derive(Clone, Debug)]
pub struct Target {
    /// The job's name.
    pub job: String,
    /// Its address.
    pub address: SocketAddr,
    /// How it is accessed.
    pub access: TargetAccess,
}

/// How a part is accessed.
#[derive(Clone, Debug)]
pub enum TargetAccess {
    /// Without TLS.
    Plain,
    /// With the token in a file.
    Token(PathBuf, Server),
    /// With the administrator's certificate.
    Certificate(Server),
}

/// A part with a certificate.
#[derive(Clone, Debug)]
pub struct Server {
    /// The name in its certificate.
    pub name: String,
    /// The administrator's `identity` directory.
    pub identity: PathBuf,
}

/// A running Prometheus server. Ended when dropped.
#[derive(Debug)]
pub struct Prometheus {
    child: Child,
    address: SocketAddr,
    log: PathBuf,
}

impl Prometheus {
    /// Starts `program` in a new directory, with the alert rules of `rules`, and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start(program: &Path, directory: &Path, targets: &[Target], rules: &Path) -> Self {
        fs::create_dir(directory).expect("a directory");
        let mut config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{}]\n\
             scrape_configs:\n",
            rules.display()
        );
        for target in targets {
            config += &format!(
                "- job_name: {}\n  static_configs: [{{targets: ['{}']}}]\n",
                target.job, target.address
            );
            let tls = |server: &Server| {
                let ca = server.identity.join("ca.pem");
                format!("ca_file: '{}', server_name: {}", ca.display(), server.name)
            };
            config += &match &target.access {
                TargetAccess::Plain => String::new(),
                TargetAccess::Token(token, server) => format!(
                    "  scheme: https\n  tls_config: {{{}}}\n  authorization: {{credentials_file: '{}'}}\n",
                    tls(server),
                    token.display()
                ),
                TargetAccess::Certificate(server) => format!(
                    "  scheme: https\n  tls_config: {{{}, cert_file: '{1}/cert.pem', key_file: '{1}/key.pem'}}\n",
                    tls(server),
                    server.identity.display()
                ),
            };
        }
        let config_path = directory.join("prometheus.yml");
        fs::write(&config_path, config).expect("its configuration");
        let log = directory.join("log");
        let address = free_address();
        let child = Command::new(program)
            .arg(format!("--config.file={}", config_path.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                directory.join("data").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).expect("its log"))
            .spawn()
            .expect("it starts");
        let prometheus = Self {
            child,
            address,
            log,
        };
        wait_until("Prometheus answers", DEADLINE, || {
            prometheus.get("/api/v1/targets").is_some()
        });
        prometheus
    }

    /// Waits until it has scraped every target.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_for_targets(&self, count: usize) {
        let mut last = Value::Null;
        let up = |targets: &Value| {
            let targets = targets["data"]["activeTargets"].as_array();
            let targets = targets.map_or(&[][..], Vec::as_slice);
            targets.len() == count && targets.iter().all(|it| it["health"] == "up")
        };
        let end = std::time::Instant::now() + DEADLINE;
        while std::time::Instant::now() < end {
            if let Some(targets) = self.get("/api/v1/targets?state=active") {
                if up(&targets) {
                    return;
                }
                last = targets;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        panic!(
            "not every target is up: {last:#}\n{}",
            fs::read_to_string(&self.log).unwrap_or_default()
        );
    }

    /// The series that a query currently returns.
    ///
    /// # Panics
    /// When the server refuses it.
    #[must_use]
    pub fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let answer = self.get(&format!("/api/v1/query?query={encoded}"));
        let answer = answer.unwrap_or_else(|| panic!("no answer to {query}"));
        assert_eq!(answer["status"], "success", "{query}: {answer:#}");
        answer["data"]["result"].as_array().expect("series").clone()
    }

    /// Waits until a query returns at least one series.
    ///
    /// # Panics
    /// When it does not, or the server refuses it.
    pub fn wait_for_data(&self, query: &str) {
        wait_until(&format!("data for {query}"), DEADLINE, || {
            !self.query(query).is_empty()
        });
    }

    /// Names of all metrics that it has seen.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn metric_names(&self) -> Vec<String> {
        let answer = self.get("/api/v1/label/__name__/values").expect("names");
        serde_json::from_value(answer["data"].clone()).expect("a list of names")
    }

    /// Gets a path; `None` while the server does not answer with JSON.
    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(DEADLINE)).ok()?;
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n",
            self.address
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        serde_json::from_str(body).ok()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
