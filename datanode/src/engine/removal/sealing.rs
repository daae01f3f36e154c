//! At which length a replica is sealed whose writer is gone, or is to be. What is behind that is cut off.

/// A replica has less than it is to be sealed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the replica has {have_chunks} chunks only")]
pub struct Short {
    /// What it has.
    pub have_chunks: u32,
}

/// A replica that is to be sealed at this many chunks.
#[derive(Clone, Copy, Debug)]
pub struct Sealing {
    chunks: u32,
}

/// What follows from a look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It is sealed already, and stays as it is.
    Done,
    /// Its writer is to let go of it.
    TakeOver,
}

/// What is to be done with one whose writer has let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is to be sealed.
    Seal,
    /// First it is to be written again: a sync of it failed, or it was found at the start, so that
    /// a sync alone proves nothing.
    Prove,
}

impl Sealing {
    /// At so many chunks.
    pub fn at(chunks: u32) -> Self {
        Self { chunks }
    }

    /// A look at a replica that has so many chunks.
    ///
    /// # Errors
    /// It is sealed, and shorter.
    pub fn look(&self, have_chunks: u32, is_sealed: bool) -> Result<Look, Short> {
        if !is_sealed {
            // What it has now says nothing: its writer may add to it until it has let go.
            return Ok(Look::TakeOver);
        }
        self.enough(have_chunks).map(|()| Look::Done)
    }

    /// Its writer has let go, and it has so many chunks.
    ///
    /// # Errors
    /// It is shorter.
    pub fn taken(&self, have_chunks: u32, is_unproven: bool) -> Result<Taken, Short> {
        self.enough(have_chunks)?;
        Ok(if is_unproven {
            Taken::Prove
        } else {
            Taken::Seal
        })
    }

    /// It was written again, as far as it matched its checksums.
    ///
    /// # Errors
    /// It is shorter; what is behind that is not there.
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

/// The length at which a replica is sealed that is too short for `length_bytes`, where nothing more will come, also
/// if that is none: the namenode has only what is sealed removed, and an empty replica is in the way of a better one.
/// `None` if it is not shorter. Each time it is less.
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
        /// What it is taken to have.
        chunks: u32,
        /// What matches its checksums by now.
        good_chunks: u32,
        is_unproven: bool,
    }

    impl Replica {
        /// As the store carries it out; its writer adds so much before it lets go.
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
        /// It is sealed at what is asked for, or all that is there if that is less; never at more than matches its
        /// checksums where that is not certain; and what is sealed never changes.
        #[test]
        fn what_is_there_is_sealed(
            chunks in 0u32..10,
            lost_chunks in 0u32..10,
            late_chunks in 0u32..3,
            is_unproven: bool,
            asked in prop::collection::vec(1u32..15, 1..4),
        ) {
            // What is lost is lost of a replica that is not proven only.
            let lost_chunks = if is_unproven { lost_chunks.min(chunks) } else { 0 };
            let mut replica = Replica {
                sealed: None,
                chunks,
                good_chunks: chunks - lost_chunks,
                // One that was lost has no writer any more.
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
