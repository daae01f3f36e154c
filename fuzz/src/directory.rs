//! The namenode's data directory as a whole: the server is started on it.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use harvestfs_namenode::journal::{Journal, JournalOptions};
use harvestfs_namenode::server::{FormatOptions, Namenode, NamenodeError, NamenodeOptions, format};
use harvestfs_protocol::identity::{CertificateAuthority, Identity, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::types::{Durability, PlacementRules};

use crate::{parts, put, scratch};

const CLUSTER: ClusterId = ClusterId(7);
/// The smallest segment size that a namenode accepts.
const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;

/// The first byte decides whether the checksum of the keys is corrected, and whether the content of a group member's
/// file gets its header. Then four parts follow: the file of the cluster's id (the correct one if empty), the file of
/// the keys (absent if empty), the file of the member (absent if empty), and records for the journal after the one
/// that formats the cluster (each preceded by its length: u16, little-endian). The namenode must start, or report why
/// it does not.
pub fn namenode_directory(input: &[u8]) {
    let Some((flags, rest)) = input.split_first() else {
        return;
    };
    let [cluster_id, keys, member, mut records] = parts(rest);
    let directory = scratch().join("namenode");
    let _ = std::fs::remove_dir_all(&directory);
    make(&directory, &mut records);
    if !cluster_id.is_empty() {
        put(&directory.join("cluster-id"), cluster_id);
    }
    if !keys.is_empty() {
        let mut keys = keys.to_vec();
        if flags & 1 != 0 {
            keys.extend(crc32fast::hash(&keys).to_le_bytes());
        }
        put(&directory.join("token-keys"), &keys);
    }
    if !member.is_empty() {
        let mut file = Vec::new();
        if flags & 2 != 0 {
            file.extend_from_slice(b"HFSMEMB\0\x01\0\0\0");
            file.extend_from_slice(&crc32fast::hash(member).to_le_bytes());
        }
        file.extend_from_slice(member);
        put(&directory.join("journal").join("member"), &file);
    }
    RUNTIME.with_borrow(|(runtime, identity)| {
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut options = NamenodeOptions::new(directory, any_port, identity.clone());
        options.segment_bytes = SEGMENT_BYTES;
        runtime.block_on(async {
            match Namenode::start(options).await {
                Ok(namenode) => namenode.kill().await.expect("nothing was asked of it"),
                Err(error) => assert!(!matches!(error, NamenodeError::Panicked), "{error}"),
            }
        });
    });
}

thread_local! {
    static RUNTIME: RefCell<(tokio::runtime::Runtime, Identity)> = RefCell::new({
        let authority = CertificateAuthority::in_memory().expect("random numbers");
        let identity = authority.issue(Role::Namenode, "namenode", Duration::from_secs(86_400));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        (runtime.expect("a runtime"), identity.expect("a certificate"))
    });
}

fn make(directory: &Path, records: &mut &[u8]) {
    format(
        directory,
        &FormatOptions {
            cluster: CLUSTER,
            root_uid: 0,
            root_gid: 0,
            block_bytes: 1 << 20,
            default_rules: PlacementRules {
                replication: 3,
                durability: Durability::Strict,
                class: None,
            },
            segment_bytes: SEGMENT_BYTES,
            group: None,
        },
    )
    .expect("a new directory");
    let options = JournalOptions {
        segment_bytes: SEGMENT_BYTES,
        ..JournalOptions::new(directory.join("journal"), CLUSTER.0)
    };
    let (mut journal, _) = Journal::open(&options).expect("a new journal");
    while let Some((length, after)) = records.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (record, after) = after.split_at(length);
        *records = after;
        if journal.append(&[record]).is_err() {
            break;
        }
    }
    journal.sync().expect("the disk works");
}
