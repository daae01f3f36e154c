//! The fuzz targets as plain functions: `fuzz_targets/` passes them to libFuzzer, and the smoke test passes them the
//! seeds.
//!
//! Each function panics only on a defect: a panic in the code under test, or a broken promise of it (decoded values
//! encode to the same value again, recovery returns only what was written, and the like).

// The sources that are compiled in have tests, which run where they belong: `--all-targets` would compile them here.
#![cfg(not(test))]

mod backups;
mod checkpoints;
mod data;
mod directory;
mod frames;
mod history;
mod identities;
mod journal;
mod namespace;
pub mod seeds;
mod settings;
mod volumes;

// The binary and the datanode have no public modules for these, so their sources are compiled in.
#[allow(dead_code, unused_imports)]
#[path = "../../cli/src/config/mod.rs"]
mod config;
#[allow(dead_code, unused_imports)]
#[path = "../../datanode/src/engine/mod.rs"]
mod engine;
#[allow(dead_code)]
#[path = "../../cli/src/http.rs"]
mod http;
#[allow(dead_code, unused_imports)]
#[path = "../../datanode/src/store/mod.rs"]
mod store;
#[allow(dead_code)]
#[path = "../../cli/src/units.rs"]
mod units;

pub use self::backups::backup_files;
pub use self::checkpoints::checkpoint_files;
pub use self::data::data_messages;
pub use self::directory::namenode_directory;
pub use self::frames::{frames, rpc_replies, rpc_requests};
pub use self::history::{history_files, trace_files};
pub use self::identities::{identity_files, peer_names};
pub use self::journal::{journal_files, journal_recovery, journal_snapshot};
pub use self::namespace::{namespace_commands, namespace_snapshot};
pub use self::settings::config_files;
pub use self::volumes::{replica_files, version_file};

/// The type of a fuzz target.
pub type Target = fn(&[u8]);

/// All targets by name.
pub const TARGETS: &[(&str, Target)] = &[
    ("backup_files", backup_files),
    ("checkpoint_files", checkpoint_files),
    ("config_files", config_files),
    ("data_messages", data_messages),
    ("frames", frames),
    ("history_files", history_files),
    ("identity_files", identity_files),
    ("journal_files", journal_files),
    ("journal_recovery", journal_recovery),
    ("journal_snapshot", journal_snapshot),
    ("namenode_directory", namenode_directory),
    ("namespace_commands", namespace_commands),
    ("namespace_snapshot", namespace_snapshot),
    ("peer_names", peer_names),
    ("replica_files", replica_files),
    ("rpc_replies", rpc_replies),
    ("rpc_requests", rpc_requests),
    ("trace_files", trace_files),
    ("version_file", version_file),
];

/// Checks that a decoded message can be encoded, and that the result decodes to the same message. (The bytes may
/// differ: postcard accepts numbers in longer encodings than necessary.)
fn check_encodes<M>(message: &M)
where
    M: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let mut bytes = Vec::new();
    harvestfs_protocol::codec::encode_frame(&mut bytes, message, 0).expect("it was decoded");
    let (again, data, rest): (M, _, _) =
        harvestfs_protocol::codec::decode_frame(&bytes).expect("it was encoded just now");
    assert_eq!(*message, again);
    assert!(data.is_empty() && rest.is_empty());
}

/// Returns a directory of this thread that is reused for all inputs, because creating one takes longer than
/// processing an input. Put it on a tmpfs with `TMPDIR`.
fn scratch() -> std::path::PathBuf {
    thread_local! {
        static DIRECTORY: tempfile::TempDir = tempfile::tempdir().expect("TMPDIR can be written");
    }
    DIRECTORY.with(|directory| directory.path().to_owned())
}

/// Writes a file that only its owner can access.
fn put(path: &std::path::Path, content: &[u8]) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, content).expect("TMPDIR has room");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path, mode).expect("the file is ours");
}

/// Splits an input into parts: each but the last is preceded by its length (u16, little-endian).
fn parts<const N: usize>(input: &[u8]) -> [&[u8]; N] {
    let mut rest = input;
    let mut parts = [&[][..]; N];
    for (index, part) in parts.iter_mut().enumerate() {
        if index + 1 == N {
            *part = rest;
        } else if let Some((length, after)) = rest.split_first_chunk::<2>() {
            let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
            (*part, rest) = after.split_at(length);
        }
    }
    parts
}
