//! Messages as each release sent them, in `tests/fixtures/<release>/frames.txt`: every later release must read them,
//! and send them as the same bytes.
//!
//! A line consists of the type of the message, the script of its value ([`samples`]), and its bytes.

use std::collections::BTreeSet;
use std::fmt::{Debug, Write as _};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Release, Version, Versioned, Versions, samples};
use crate::codec::{Hello, decode_header};
use crate::data::{Opening, Packet, ReadPacket, SealReply, ShortCircuitReply, WriteAck};
use crate::meta::Notice;
use crate::rpc::{Request, Response};
use crate::short_circuit::{FileReply, FileRequest};
use crate::transport::{RequestFrame, ServerFrame};

/// The releases and their versions.
const RELEASES: &[(&str, Version)] = &[("0.2.0", Version::V0_2)];

impl<T: Versioned> Versioned for RequestFrame<T> {
    fn since(&self) -> Version {
        self.body.since()
    }
}

impl<T: Versioned, N: Versioned> Versioned for ServerFrame<T, N> {
    fn since(&self) -> Version {
        match self {
            Self::Response { body, .. } => body.since(),
            Self::Abandoned { .. } => Version::V0_2,
            Self::Notice(notice) => notice.since(),
        }
    }
}

fn fixtures(release: &str) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.join("../tests/fixtures").join(release)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes_of(hexadecimal: &str) -> Vec<u8> {
    let digits: Vec<u32> = hexadecimal
        .chars()
        .map(|digit| digit.to_digit(16).expect("hexadecimal digits"))
        .collect();
    let pairs = digits.chunks(2);
    pairs.map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

/// What to do with a type of messages.
trait Work {
    fn on<T>(&mut self, name: &'static str)
    where
        T: Serialize + DeserializeOwned + PartialEq + Debug + Versioned;
}

/// All types of messages that are sent by themselves.
fn each_type(work: &mut impl Work) {
    work.on::<RequestFrame<Request>>("request");
    work.on::<ServerFrame<Response, Notice>>("response");
    work.on::<Opening>("opening");
    work.on::<Packet>("packet");
    work.on::<WriteAck>("write_ack");
    work.on::<ReadPacket>("read_packet");
    work.on::<SealReply>("seal_reply");
    work.on::<ShortCircuitReply>("short_circuit_reply");
    work.on::<FileRequest>("file_request");
    work.on::<FileReply>("file_reply");
}

fn script_text(script: &[u32]) -> String {
    let numbers: Vec<String> = script.iter().map(u32::to_string).collect();
    format!(".{}", numbers.join("."))
}

/// Lines for all messages of a version.
struct Recorder {
    version: Version,
    lines: String,
}

impl Work for Recorder {
    fn on<T>(&mut self, name: &'static str)
    where
        T: Serialize + DeserializeOwned + PartialEq + Debug + Versioned,
    {
        for (script, value) in samples::all::<T>() {
            if value.since() > self.version {
                continue;
            }
            let bytes = postcard::to_stdvec(&value).expect("memory");
            let (script, bytes) = (script_text(&script), hexadecimal(&bytes));
            writeln!(self.lines, "{name} {script} {bytes}").expect("memory");
        }
    }
}

/// Reads all lines of a type.
struct Reader<'a> {
    version: Version,
    lines: &'a str,
    read: usize,
}

impl Work for Reader<'_> {
    fn on<T>(&mut self, name: &'static str)
    where
        T: Serialize + DeserializeOwned + PartialEq + Debug + Versioned,
    {
        let mut scripts = BTreeSet::new();
        for line in self.lines.lines() {
            let parts: Vec<&str> = line.split(' ').collect();
            let [of, script, recorded] = parts[..] else {
                panic!("{line}");
            };
            if of != name {
                continue;
            }
            let numbers = script.split('.').filter(|it| !it.is_empty());
            let numbers: Vec<u32> = numbers.map(|it| it.parse().expect("a number")).collect();
            let recorded = bytes_of(recorded);
            let read: T =
                decode_header(&recorded).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert_eq!(read, samples::of::<T>(&numbers), "{line}");
            assert!(read.since() <= self.version, "{line}: {read:?}");
            let sent = postcard::to_stdvec(&read).expect("memory");
            assert_eq!(
                hexadecimal(&sent),
                hexadecimal(&recorded),
                "{line}: {read:?}"
            );
            scripts.insert(numbers);
            self.read += 1;
        }
        for (script, value) in samples::all::<T>() {
            assert!(
                value.since() > self.version || scripts.contains(&script),
                "version {} did not have the {name} {value:?}: say in version/since.rs since when it \
                 exists",
                self.version
            );
        }
    }
}

#[test]
fn what_releases_sent_is_read_and_sent_as_it_was() {
    for &(release, version) in RELEASES {
        let path = fixtures(release).join("frames.txt");
        if release == env!("CARGO_PKG_VERSION") && !path.exists() {
            record(release, version);
            panic!("what {release} sends was recorded: commit it");
        }
        let lines = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let mut reader = Reader {
            version,
            lines: &lines,
            read: 0,
        };
        each_type(&mut reader);
        assert_eq!(reader.read, lines.lines().count(), "{release}");
        let hello = fs::read(fixtures(release).join("hello")).expect("its hello");
        let (read, rest) = Hello::decode(&hello).expect("a hello");
        let expected = Hello {
            versions: Versions {
                newest: version,
                oldest: read.versions.oldest,
            },
            release: Release::cut(release),
        };
        assert_eq!((read, rest), (expected, &b""[..]));
        assert!(
            Versions::OURS.in_common(read.versions).is_some(),
            "{read:?}"
        );
    }
}

/// Records what this release sends.
fn record(release: &str, version: Version) {
    let mut recorder = Recorder {
        version,
        lines: String::new(),
    };
    each_type(&mut recorder);
    let directory = fixtures(release);
    fs::create_dir_all(&directory).unwrap();
    let hello = Hello {
        versions: Versions::OURS,
        release: Release::OURS,
    };
    for (name, content) in [
        ("frames.txt", recorder.lines.as_bytes()),
        ("hello", &hello.encode()),
    ] {
        // A recording is never overwritten.
        let created = fs::File::create_new(directory.join(name));
        std::io::Write::write_all(&mut created.unwrap(), content).unwrap();
    }
}
