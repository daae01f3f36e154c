//! The comparison of what was promised to programs on mounts, by a client with empty caches.

use bytes::Bytes;
use harvestfs_client::{Client, ClientError, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;

use super::model::Files;
use super::name;
use crate::live::verify::{Comparison, list, note};

/// Compares the directory of one mount.
pub(crate) async fn compare(client: &Client, mount: usize, files: &Files, to: &mut Comparison) {
    let directory = name(mount);
    for (file, entry) in files.entries() {
        to.names += 1;
        let path = format!("/{directory}/{file}");
        let me = Credentials::root();
        let read = match client.read_file(&me, path.as_bytes()).await {
            Ok(bytes) => Some(bytes),
            Err(ClientError::Fs(FsError::NotFound)) => None,
            Err(error) if entry.is_settled() => {
                note(&mut to.lost, format!("{path}: {error}"));
                continue;
            }
            // What was written last and not synced may be lost with all of its servers, but never what was synced
            // before.
            Err(error) => {
                to.not_promised += 1;
                let certain = entry.certain();
                match begin(client, path.as_bytes(), certain.len()).await {
                    Ok(found) if found == certain => {}
                    Ok(_) => note(
                        &mut to.wrong,
                        format!("{path}: begins with other bytes; then {error}"),
                    ),
                    Err(error) => note(
                        &mut to.lost,
                        format!("{path}: cannot be read from the beginning: {error}"),
                    ),
                }
                continue;
            }
        };
        match entry.difference(read.as_deref()) {
            Some(difference) if read.is_none() => {
                note(&mut to.lost, format!("{path}: {difference}"));
            }
            Some(difference) => note(&mut to.wrong, format!("{path}: {difference}")),
            None => {
                to.files += u64::from(read.is_some());
                to.bytes += read.map_or(0, |bytes| bytes.len() as u64);
            }
        }
    }
    let may_exist = |text: &str| files.get(text).is_some();
    if let Err(error) = list(client, &directory, &may_exist, to).await
        && files.entries().values().any(|entry| entry.is_settled())
    {
        note(&mut to.lost, format!("/{directory}: {error}"));
    }
}

/// Reads the first bytes of a file.
async fn begin(client: &Client, path: &[u8], len: usize) -> Result<Bytes, ClientError> {
    if len == 0 {
        return Ok(Bytes::new());
    }
    let me = Credentials::root();
    let file = client.open_path(&me, path, OpenFlags::READ, None).await?;
    file.read(0, len).await
}
