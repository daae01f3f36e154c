//! Lending the files of sealed replicas to readers on this host.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;

use super::block_store::BlockStore;
use super::error::StoreError;
use super::replica::OpenFile;

/// A file that is lent.
pub struct Lent {
    /// The descriptor to hand over; read-only.
    pub file: OwnedFd,
    /// To be kept as long as the file is lent: if the replica is removed in the meantime, its space counts as used
    /// until then.
    pub loan: Arc<OpenFile>,
}

impl BlockStore {
    /// Opens the file of a sealed replica for a reader that verifies what it reads. A corrupt replica is not lent: it
    /// may be removed at any time, and each read of it has to be observed here.
    ///
    /// # Errors
    /// [`StoreError::OutOfOrder`] if it is not sealed, or why it cannot be opened.
    pub async fn lend(&self, block: BlockId) -> Result<Lent, StoreError> {
        let readable = self.inventory.intact(block)?;
        readable.volume.check_usable()?;
        if readable.open.is_some() {
            return Err(StoreError::OutOfOrder("the replica is not sealed".into()));
        }
        let inventory = self.inventory.clone();
        let volume = readable.volume.clone();
        volume
            .run(move || {
                let loan = inventory.file_of(block, &readable)?.into_file();
                let path = readable.volume.sealed_path(block);
                let opened = readable.volume.disk().open_to_lend(&path);
                let file = opened.map_err(|error| match error.kind() {
                    io::ErrorKind::Unsupported => {
                        StoreError::OutOfOrder("this disk lends no files".into())
                    }
                    _ => StoreError::disk("opening", &path)(error),
                })?;
                Ok(Lent { file, loan })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{create, packet, real_store, write_sealed};
    use super::*;

    #[tokio::test]
    async fn the_space_of_a_removed_replica_is_taken_as_long_as_it_is_lent() {
        let dir = tempfile::tempdir().unwrap();
        let store = real_store(dir.path());
        let mut writer = create(&store, 1).await.unwrap();
        let data = packet(0, &[7; 20_000], false);
        writer.write(vec![data], false).await.unwrap();
        writer.seal(20_000).await.unwrap();
        let used_bytes = || store.status()[0].used_bytes;
        let full_bytes = used_bytes();
        let lent = store.lend(BlockId(1)).await.unwrap();
        store.delete(BlockId(1)).await.unwrap();
        assert_eq!(used_bytes(), full_bytes);
        drop(lent);
        assert!(used_bytes() < full_bytes);
        assert!(matches!(
            store.lend(BlockId(1)).await,
            Err(StoreError::NoSuchReplica)
        ));
    }

    /// Otherwise more space than the quota allows would be taken as long as the loan lasts.
    #[tokio::test]
    async fn it_is_taken_also_if_many_others_were_opened_since() {
        let dir = tempfile::tempdir().unwrap();
        let store = real_store(dir.path());
        write_sealed(&store, 1, &[7; 20_000]).await.unwrap();
        let used_bytes = || store.status()[0].used_bytes;
        let full_bytes = used_bytes();
        let lent = store.lend(BlockId(1)).await.unwrap();
        let volume = &store.volumes()[0];
        for _ in 0..1_000 {
            let file = volume.disk().open(&volume.sealed_path(BlockId(1)));
            let other = store.inventory.next_generation();
            let other_file = OpenFile::new(file.unwrap());
            store.inventory.files.put(other, other_file);
        }
        store.delete(BlockId(1)).await.unwrap();
        assert_eq!(used_bytes(), full_bytes);
        drop(lent);
        assert!(used_bytes() < full_bytes);
    }
}
