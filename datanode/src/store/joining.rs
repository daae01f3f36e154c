//! Volumes that are opened only after the others are in use.

use std::collections::hash_map;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use harvestfs_protocol::ids::ClusterId;

use super::inventory::{Entry, Inventory};
use super::volume::{Found, Volume};

impl Inventory {
    /// The volumes that are open.
    pub(super) fn volumes(&self) -> impl Iterator<Item = &Arc<Volume>> {
        self.slots.iter().filter_map(|slot| slot.get())
    }

    /// The volume of this number, which is open.
    pub(super) fn volume(&self, index: usize) -> &Arc<Volume> {
        let volume = self.slots[index].get();
        volume.expect("a number is that of a volume which is open, and none is closed")
    }

    /// A volume joins, with what was found on it. Of a block that another one has already, that one's file stays in
    /// use, whatever this one's is worth: somebody may be at work on it.
    pub(super) fn join(&self, volume: &Arc<Volume>, found: Vec<Found>) {
        let others = self.volumes().filter(|it| it.health.is_good());
        let repairs = others.map(|it| it.repairs.load(Ordering::Relaxed)).min();
        // Else it would receive all of them until it has received as many.
        let repairs = repairs.unwrap_or(0);
        volume.repairs.store(repairs, Ordering::Relaxed);
        let mut doubles = Vec::new();
        {
            // Until all is there: who sees the volume sees what is on it, or reports would say that it is empty.
            let mut replicas = self.lock();
            let mut slots = self.slots.iter();
            let index = slots.position(|slot| slot.set(volume.clone()).is_ok());
            let index = index.expect("there is a slot for each volume that may join");
            replicas.reserve(found.len());
            for found in found {
                let (block, entry) = Entry::found(index, self.next_generation(), found);
                match replicas.entry(block) {
                    hash_map::Entry::Vacant(vacant) => {
                        vacant.insert(entry);
                    }
                    hash_map::Entry::Occupied(_) => doubles.push((block, entry)),
                }
            }
        }
        for (block, _) in &doubles {
            tracing::warn!(
                %block,
                volume = %volume.path().display(),
                "there are two files of one replica: the one of this volume is left alone"
            );
        }
    }
}

impl Volume {
    /// Makes it part of a cluster. It goes down if it is part of another one.
    pub async fn join_cluster(self: &Arc<Self>, cluster: ClusterId) {
        if self.cluster() == Some(cluster) {
            return;
        }
        let claimed = self.clone();
        let claim = move || {
            if let Err(error) = claimed.claim(cluster) {
                claimed.health.fail(&error.to_string(), claimed.path());
            }
            Ok(())
        };
        if let Err(error) = self.run(claim).await {
            tracing::warn!(%error, "the volume is not part of the cluster");
        }
    }
}
