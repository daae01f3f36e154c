//! A headless Chromium that shows one page, driven over its debugging pipe.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Maximum time for an answer on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// A browser with one page. Ended when dropped.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    requests: ChildStdin,
    messages: mpsc::Receiver<Value>,
    next_id: u64,
    session: Option<String>,
    /// Problems that the page reported: errors and warnings of the console, exceptions, failed loads.
    complaints: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// Starts `program` with an empty page.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(program: &Path) -> Self {
        let profile = tempfile::tempdir().expect("a directory");
        // The browser communicates on descriptors 3 and 4, which the shell connects to our pipes.
        let mut child = Command::new("sh")
            .args([
                "-c",
                "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1",
            ])
            .arg(program)
            .args([
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--no-first-run",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-extensions",
                "--disable-background-networking",
                "--hide-scrollbars",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        let requests = child.stdin.take().expect("it was asked for");
        let answers = child.stdout.take().expect("it was asked for");
        let mut browser = Self {
            child,
            requests,
            messages: listen(answers),
            next_id: 0,
            session: None,
            complaints: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Accessibility"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Shows a page on a screen of this size, with the light or the dark color scheme.
    pub fn show(&mut self, url: &str, width: u32, height: u32, scheme: &str) {
        let screen = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
        });
        self.call("Emulation.setDeviceMetricsOverride", screen);
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call(
            "Emulation.setEmulatedMedia",
            json!({ "features": features }),
        );
        self.evaluate("window.isOld = true");
        self.call("Page.navigate", json!({ "url": url }));
        let end = Instant::now() + DEADLINE;
        let loaded = "window.isOld !== true && document.readyState === 'complete'";
        let asked = json!({ "expression": loaded, "returnByValue": true });
        loop {
            // This is refused while one document replaces the other.
            let answer = self.try_call("Runtime.evaluate", asked.clone());
            if answer.is_ok_and(|answer| answer["result"]["value"] == true) {
                return;
            }
            assert!(Instant::now() < end, "{url} is not shown");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The value of an expression in the page, after waiting for promises.
    ///
    /// # Panics
    /// When it throws.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let asked = json!({
            "expression": expression, "awaitPromise": true, "returnByValue": true,
        });
        let answer = self.call("Runtime.evaluate", asked);
        assert!(
            answer.get("exceptionDetails").is_none(),
            "{expression}: {answer:#}"
        );
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    ///
    /// # Panics
    /// When it does not become true in time.
    pub fn wait_for(&mut self, expression: &str) {
        let end = Instant::now() + DEADLINE;
        while self.evaluate(&format!("Boolean({expression})")) != true {
            assert!(
                Instant::now() < end,
                "{expression} is not true; the page says:\n{}",
                self.evaluate("document.body?.innerText ?? ''")
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Presses a key on the page.
    pub fn press(&mut self, key: &str, code: u32) {
        let key_event = |kind: &str| {
            json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code,
                "text": if key == "Enter" { "\r" } else { "" },
            })
        };
        self.call("Input.dispatchKeyEvent", key_event("keyDown"));
        self.call("Input.dispatchKeyEvent", key_event("keyUp"));
    }

    /// Roles and names of everything on the page, as assistive technology gets them.
    ///
    /// # Panics
    /// When the browser does not report them.
    pub fn accessible(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}));
        let nodes = tree["nodes"].as_array().expect("nodes");
        let text = |value: &Value| value["value"].as_str().unwrap_or("").trim().to_owned();
        let seen = nodes.iter().filter(|node| node["ignored"] != true);
        seen.map(|node| (text(&node["role"]), text(&node["name"])))
            .collect()
    }

    /// Takes a screenshot of the whole page: a PNG file in base64, as returned by the browser.
    pub fn screenshot(&mut self) -> String {
        let picture = json!({ "format": "png", "captureBeyondViewport": true });
        let answer = self.call("Page.captureScreenshot", picture);
        answer["data"].as_str().unwrap_or_default().to_owned()
    }

    /// Problems that the page reported since the last call.
    pub fn complaints(&mut self) -> Vec<String> {
        // Events from before the answer have arrived by then.
        self.evaluate("0");
        std::mem::take(&mut self.complaints)
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        let answer = self.try_call(method, parameters);
        answer.unwrap_or_else(|error| panic!("{method}: {error:#}"))
    }

    /// The answer, or the browser's refusal.
    fn try_call(&mut self, method: &str, parameters: Value) -> Result<Value, Value> {
        self.next_id += 1;
        let id = self.next_id;
        let mut request = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(0);
        self.requests
            .write_all(&bytes)
            .expect("the browser listens");
        self.requests.flush().expect("the browser listens");
        let end = Instant::now() + DEADLINE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let message = self.messages.recv_timeout(left);
            let message = message.unwrap_or_else(|error| panic!("{method}: {error}"));
            if message["id"] == id {
                return match message.get("error") {
                    None => Ok(message["result"].clone()),
                    Some(error) => Err(error.clone()),
                };
            }
            self.hear(&message);
        }
    }

    fn hear(&mut self, message: &Value) {
        let details = &message["params"];
        let is_complaint = match message["method"].as_str() {
            Some("Runtime.consoleAPICalled") => {
                matches!(
                    details["type"].as_str(),
                    Some("error" | "warning" | "assert")
                )
            }
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => {
                matches!(
                    details["entry"]["level"].as_str(),
                    Some("error" | "warning")
                )
            }
            _ => false,
        };
        if is_complaint {
            self.complaints.push(details.to_string());
        }
    }
}

/// Receives messages, which are JSON, each followed by a NUL.
fn listen(answers: ChildStdout) -> mpsc::Receiver<Value> {
    let (sender, messages) = mpsc::channel();
    thread::spawn(move || {
        for message in BufReader::new(answers).split(0) {
            let parsed = message.ok().and_then(|it| serde_json::from_slice(&it).ok());
            let Some(parsed) = parsed else {
                return;
            };
            if sender.send(parsed).is_err() {
                return;
            }
        }
    });
    messages
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It ends its children, too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
