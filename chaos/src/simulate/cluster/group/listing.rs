//! Lists the contents of a namespace, to compare them with those of another namenode.

use std::collections::BTreeMap;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

const PAGE_ENTRIES: usize = 1_000;

/// A description of each file and directory, by path.
pub type Listing = BTreeMap<String, String>;

/// Lists everything that has a name, without changing anything.
///
/// # Errors
/// When the namenode becomes unreachable in the meantime.
pub async fn of(client: &Client) -> Result<Listing, ClientError> {
    let me = Credentials::root();
    let mut listing = Listing::new();
    let mut directories = vec![(String::new(), InodeId::ROOT)];
    while let Some((path, ino)) = directories.pop() {
        let mut after = None;
        loop {
            let page = client.readdir(&me, ino, after.as_ref(), PAGE_ENTRIES, true);
            let page = page.await?;
            for entry in &page.entries {
                let path = format!("{path}/{}", String::from_utf8_lossy(entry.name.as_bytes()));
                let attr = match entry.attr.clone() {
                    Some(attr) => attr,
                    None => client.lookup(&me, ino, &entry.name).await?,
                };
                let mut is = describe(&attr);
                if attr.kind == FileKind::Symlink {
                    is += &format!(" to {:?}", client.readlink(&me, attr.ino).await?);
                }
                let mut names = client.listxattr(&me, attr.ino).await?;
                names.sort();
                for name in names {
                    let value = client.getxattr(&me, attr.ino, &name).await?;
                    is += &format!(" {name:?}={value:?}");
                }
                if attr.kind == FileKind::Directory {
                    directories.push((path.clone(), attr.ino));
                }
                listing.insert(path, is);
            }
            if page.end || page.entries.is_empty() {
                break;
            }
            after = page.entries.last().map(|entry| entry.name.clone());
        }
    }
    Ok(listing)
}

/// Describes attributes, except the time of the last access, which each client may set late.
fn describe(attr: &Attr) -> String {
    let Attr {
        ino,
        kind,
        mode,
        nlink,
        uid,
        gid,
        rdev,
        size_bytes,
        allocated_bytes,
        atime: _,
        mtime,
        ctime,
        content_version,
    } = attr;
    format!(
        "{kind:?} {ino:?} {mode:o} {nlink} {uid}:{gid} {rdev} {size_bytes}/{allocated_bytes} {mtime:?} {ctime:?} {content_version}"
    )
}

/// The first few differences between two listings.
pub fn differences(one: &Listing, other: &Listing) -> Vec<String> {
    const SHOWN: usize = 5;
    let paths = one.keys().chain(other.keys());
    let mut differing: Vec<&String> = paths.filter(|it| one.get(*it) != other.get(*it)).collect();
    differing.sort();
    differing.dedup();
    let shown = differing.into_iter().take(SHOWN);
    shown
        .map(|path| format!("{path}: {:?}, {:?}", one.get(path), other.get(path)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let listing = |entries: &[(&str, &str)]| -> Listing {
            let entries = entries.iter();
            entries
                .map(|(path, is)| ((*path).into(), (*is).into()))
                .collect()
        };
        let one = listing(&[("/a", "1"), ("/b", "2"), ("/c", "3")]);
        assert!(differences(&one, &one).is_empty());
        // As many entries as before, one of them different.
        let other = listing(&[("/a", "1"), ("/b", "9"), ("/d", "3")]);
        let found = differences(&one, &other);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("/b: ") && found[2].starts_with("/d: "));
    }
}
