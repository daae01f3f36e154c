//! An HTTP service whose answers a test determines.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;

/// Answers a request: method, path and body; with a status and JSON.
pub trait Answering: Send + Sync + 'static {
    fn answer(&self, method: &str, path: &str, body: &str) -> (u16, Value);
}

/// Serves until it is dropped.
pub struct Service {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Service {
    /// Starts the service at a port of this machine; at any free one with port 0.
    pub fn start(port: u16, answering: Arc<dyn Answering>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let address = listener.local_addr().unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                // The client may have disconnected.
                let _ = serve(stream.unwrap(), &*answering);
            }
        });
        Self {
            address,
            ends,
            thread: Some(thread),
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().unwrap().join();
    }
}

fn serve(stream: TcpStream, answering: &dyn Answering) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut words = first.split_whitespace();
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    // The client was ended.
    if path.is_empty() {
        return Ok(());
    }
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body = String::from_utf8(body).unwrap();
    let (status, answer) = answering.answer(method, path, &body);
    let answer = match answer {
        Value::Null => String::new(),
        answer => answer.to_string(),
    };
    write!(
        reader.get_mut(),
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
        answer.len()
    )
}
