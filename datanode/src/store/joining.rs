//! Volumes that finish opening when the others are already in use.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use harvestfs_protocol::ids::ClusterId;

use super::doubles::{Double, leave_alone, leave_several_alone};
use super::inventory::{Entry, Inventory, State};
use super::volume::{Found, FoundState, Volume};

impl Inventory {
    /// The volumes that are open.
    pub(super) fn volumes(&self) -> impl Iterator<Item = &Arc<Volume>> {
        self.slots.iter().filter_map(|slot| slot.get())
    }

    /// The open volume with this number.
    pub(super) fn volume(&self, index: usize) -> &Arc<Volume> {
        let volume = self.slots[index].get();
        volume.expect("a number is that of a volume which is open, and none is closed")
    }

    /// Adds a volume, with the replicas found on it. If another volume already has a block, the file there stays in
    /// use, as something may be working on it, unless nothing is left of it, or it is known to be bad. Returns the
    /// files of this volume that do not count.
    pub(super) fn join(self: &Arc<Self>, volume: &Arc<Volume>, found: Vec<Found>) -> Vec<Double> {
        let others = self.volumes().filter(|it| it.health.is_good());
        let repairs = others.map(|it| it.repairs.load(Ordering::Relaxed)).min();
        // Otherwise the new volume would receive all repairs until it has received as many as the others.
        let repairs = repairs.unwrap_or(0);
        volume.repairs.store(repairs, Ordering::Relaxed);
        let is_good = volume.health.is_good();
        let (mut doubles, mut replaced) = (Vec::new(), Vec::new());
        {
            // Locked until everything is in place: if the volume were visible before its replicas are, reports would
            // claim that it is empty.
            let mut replicas = self.lock();
            let mut slots = self.slots.iter();
            let index = slots.position(|slot| slot.set(volume.clone()).is_ok());
            let index = index.expect("there is a slot for each volume that may join");
            replicas.reserve(found.len());
            for found in found {
                let known = replicas.get(&found.block);
                if known.is_some_and(|known| !(is_good && self.gives_way(known, &found))) {
                    doubles.push(Double::new(self.clone(), volume.clone(), found));
                    continue;
                }
                let (block, entry) = Entry::found(index, self.next_generation(), found);
                if let Some(before) = replicas.insert(block, entry) {
                    replaced.push((block, before));
                }
            }
        }
        for (block, before) in replaced {
            self.tables.forget(before.generation);
            self.files.forget(before.generation);
            leave_alone(self.volume(before.volume), block, before.state);
        }
        leave_several_alone(&mut doubles);
        doubles
    }

    /// Whether a replica gives way to one of the block that was found elsewhere: it is lost, or corrupt while the
    /// other is sealed.
    fn gives_way(&self, known: &Entry, found: &Found) -> bool {
        let is_worse = matches!(known.state, State::Corrupt { .. });
        (is_worse && found.state == FoundState::Sealed) || self.give_up_lost(known)
    }

    /// Whether a replica is lost with its volume, so that another one may take its place. A volume that is down stays
    /// down until the next start. A replica that a job or a writer still owns is not given up: the owner may yet
    /// change its state.
    pub(super) fn give_up_lost(&self, entry: &Entry) -> bool {
        if self.volume(entry.volume).health.is_good() {
            return false;
        }
        match &entry.state {
            State::Sealed { .. } | State::Corrupt { .. } => true,
            State::Open(replica) => replica.end_if_idle().is_some(),
            State::Condemned { .. } | State::Deleting => false,
        }
    }
}

impl Volume {
    /// Makes the volume part of a cluster. It is taken down if it is part of another one. While its disk does not
    /// respond, it is left as it is.
    pub async fn join_cluster(self: &Arc<Self>, cluster: ClusterId) {
        if self.cluster().is_some() {
            // Whatever the disk does: nothing has to be written to find out.
            self.claim_or_fail(cluster);
            return;
        }
        let claimed = self.clone();
        let claim = move || {
            claimed.claim_or_fail(cluster);
            Ok(())
        };
        let done = match self.check_usable() {
            // Two jobs that replace the file simultaneously would interfere, and take the volume down.
            Ok(()) => self.run_in_turn(claim).await,
            Err(error) => Err(error),
        };
        if let Err(error) = done {
            tracing::warn!(%error, "the volume is not part of the cluster");
        }
    }

    fn claim_or_fail(&self, cluster: ClusterId) {
        if let Err(error) = self.claim(cluster) {
            self.health.fail(&error.to_string(), self.path());
        }
    }
}
