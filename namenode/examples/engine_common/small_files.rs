//! Many small files, for the examples that measure large namespaces.

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{Mutation, mutation};

use super::engine_common::{Driver, commit, create, name};

pub const FILES_PER_DIRECTORY: u64 = 1_000;

/// Makes files of one extent, and commits `files_per_commit` of them at a time. `made` is called after each file.
pub fn make_small_files<E>(
    driver: &mut Driver,
    files: u64,
    files_per_commit: usize,
    mut made: impl FnMut(&mut Driver) -> Result<(), E>,
) -> Result<(), E> {
    let mut parent = InodeId::ROOT;
    let mut written = Vec::with_capacity(files_per_commit);
    for number in 0..files {
        if number % FILES_PER_DIRECTORY == 0 {
            parent = driver.make(Mutation::MakeDir(mutation::MakeDir {
                parent: InodeId::ROOT,
                name: name("directory", number / FILES_PER_DIRECTORY),
                mode: 0o755,
            }));
        }
        let ino = driver.make(create(parent, number));
        written.push((ino, driver.next_extent()));
        if written.len() == files_per_commit || number + 1 == files {
            driver.run(commit(std::mem::take(&mut written)));
        }
        made(driver)?;
    }
    Ok(())
}
