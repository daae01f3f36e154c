//! The length at which a replica is sealed whose writer is gone or to be stopped. Data beyond that length is cut off.

/// A replica is shorter than the length at which it is to be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the replica has {have_chunks} chunks only")]
pub struct Short {
    /// The number of chunks that it has.
    pub have_chunks: u32,
}

/// A replica that is to be sealed at this many chunks.
#[derive(Clone, Copy, Debug)]
pub struct Sealing {
    chunks: u32,
}

/// The result of a first look at the replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It is already sealed, and stays as it is.
    Done,
    /// Its writer has to let go of it.
    TakeOver,
}

/// The next action for a replica whose writer has let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Seal it.
    Seal,
    /// Rewrite it first: a sync of it failed, or it was found at the start, so that a sync alone proves nothing.
    Prove,
}

impl Sealing {
    /// Seals at so many chunks.
    pub fn at(chunks: u32) -> Self {
        Self { chunks }
    }

    /// Examines a replica that has so many chunks.
    ///
    /// # Errors
    /// The replica is sealed, and shorter.
    pub fn look(&self, have_chunks: u32, is_sealed: bool) -> Result<Look, Short> {
        if !is_sealed {
            // Its current length proves nothing: its writer may append until it has let go.
            return Ok(Look::TakeOver);
        }
        self.enough(have_chunks).map(|()| Look::Done)
    }

    /// Decides what to do once the writer has let go, and the replica has so many chunks.
    ///
    /// # Errors
    /// The replica is shorter.
    pub fn taken(&self, have_chunks: u32, is_unproven: bool) -> Result<Taken, Short> {
        self.enough(have_chunks)?;
        Ok(if is_unproven {
            Taken::Prove
        } else {
            Taken::Seal
        })
    }

    /// Checks the length after the replica was rewritten, as far as it matched its checksums.
    ///
    /// # Errors
    /// The matching prefix is shorter; the rest is lost.
    pub fn proven(&self, chunks: u32) -> Result<(), Short> {
        self.enough(chunks)
    }

    fn enough(&self, have_chunks: u32) -> Result<(), Short> {
        if have_chunks < self.chunks {
            return Err(Short { have_chunks });
        }
        Ok(())
    }
}

/// Returns the length at which to seal a replica that is shorter than `length_bytes`, if nothing more will arrive;
/// that may be 0: the namenode has only sealed replicas removed, and an empty replica would block a better one.
/// Returns `None` if the replica is not shorter. The length is always less than `length_bytes`, so that retries end.
pub fn shorter(length_bytes: u64, have_bytes: u64) -> Option<u64> {
    (have_bytes < length_bytes).then_some(have_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A replica of a datanode.
    #[derive(Clone, Copy, Debug)]
    struct Replica {
        sealed: Option<u32>,
        /// The number of chunks that it is believed to have.
        chunks: u32,
        /// The number of chunks that match their checksums by now.
        good_chunks: u32,
        is_unproven: bool,
    }

    impl Replica {
        /// Seals as the store does; its writer appends so much before it lets go.
        fn seal(&mut self, chunks: u32, late_chunks: u32) -> Result<(), Short> {
            let sealing = Sealing::at(chunks);
            let have_chunks = self.sealed.unwrap_or(self.chunks);
            if sealing.look(have_chunks, self.sealed.is_some())? == Look::Done {
                return Ok(());
            }
            self.chunks += late_chunks;
            self.good_chunks += late_chunks;
            if sealing.taken(self.chunks, self.is_unproven)? == Taken::Prove {
                let written = self.good_chunks.min(chunks);
                if written < chunks {
                    self.chunks = self.chunks.min(written);
                }
                sealing.proven(written)?;
            }
            self.sealed = Some(chunks);
            Ok(())
        }

        fn seal_what_is_there(&mut self, chunks: u32, late_chunks: u32) -> Result<(), Short> {
            let (mut chunks, mut late_chunks) = (chunks, late_chunks);
            for _ in 0..4 {
                match self.seal(chunks, std::mem::take(&mut late_chunks)) {
                    Err(Short { have_chunks }) => {
                        match shorter(chunks.into(), have_chunks.into()) {
                            Some(less) => chunks = less as u32,
                            None => return Err(Short { have_chunks }),
                        }
                    }
                    Ok(()) => return Ok(()),
                }
            }
            panic!("it does not come to an end");
        }
    }

    proptest! {
        /// It is sealed at the requested length, or at its actual length if that is less; never beyond the chunks that
        /// match their checksums if that is uncertain; and a sealed replica never changes.
        #[test]
        fn what_is_there_is_sealed(
            chunks in 0u32..10,
            lost_chunks in 0u32..10,
            late_chunks in 0u32..3,
            is_unproven: bool,
            asked in prop::collection::vec(1u32..15, 1..4),
        ) {
            // Only an unproven replica loses chunks.
            let lost_chunks = if is_unproven { lost_chunks.min(chunks) } else { 0 };
            let mut replica = Replica {
                sealed: None,
                chunks,
                good_chunks: chunks - lost_chunks,
                // A replica that lost chunks has no writer any more.
                is_unproven,
            };
            let late_chunks = if is_unproven { 0 } else { late_chunks };
            let there = replica.good_chunks + late_chunks;
            let first = asked[0].min(there);
            for asked in asked {
                let sealed = replica.seal_what_is_there(asked, late_chunks);
                prop_assert_eq!(sealed, Ok(()));
                prop_assert_eq!(replica.sealed, Some(first));
            }
        }
    }
}
