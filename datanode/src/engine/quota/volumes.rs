//! Choice of the volume for a new replica.

/// A volume that can be used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number.
    pub volume: usize,
    /// Its disk is of another class than requested.
    pub is_other_class: bool,
    /// Space that may still be reserved, in bytes.
    pub available_bytes: u64,
    /// Number of replicas that are being written to it.
    pub writers: u32,
    /// Number of repairs that it has received, if the new replica is a repair: the volumes share what the namenode
    /// allows the server to receive.
    pub repairs: u64,
}

/// Returns the volumes in the order in which they are tried: the requested class before others; then, for a repair,
/// the volume that has received the fewest; then the one with the most room per writer.
pub fn order(mut candidates: Vec<Candidate>) -> impl Iterator<Item = usize> {
    candidates.sort_unstable_by_key(|it| {
        let room_bytes = it.available_bytes / (1 + u64::from(it.writers));
        let least_room_bytes = u64::MAX - room_bytes;
        (it.is_other_class, it.repairs, least_room_bytes, it.volume)
    });
    candidates.into_iter().map(|it| it.volume)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let one = (any::<bool>(), 0u64..100, 0u32..4, 0u64..3);
        prop::collection::vec(one, 0..6).prop_map(|them| {
            let with_numbers = them.into_iter().enumerate();
            let candidate =
                |(volume, (is_other_class, available_bytes, writers, repairs))| Candidate {
                    volume,
                    is_other_class,
                    available_bytes,
                    writers,
                    repairs,
                };
            with_numbers.map(candidate).collect()
        })
    }

    proptest! {
        #[test]
        fn none_is_tried_before_a_better_one(candidates in candidates()) {
            let order: Vec<usize> = order(candidates.clone()).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..candidates.len()).collect::<Vec<usize>>());
            for pair in order.windows(2) {
                let (first, second) = (candidates[pair[0]], candidates[pair[1]]);
                prop_assert!(first.is_other_class <= second.is_other_class);
                if first.is_other_class == second.is_other_class {
                    prop_assert!(first.repairs <= second.repairs);
                    if first.repairs == second.repairs {
                        let room = |it: Candidate| it.available_bytes / (1 + u64::from(it.writers));
                        prop_assert!(room(first) >= room(second));
                    }
                }
            }
        }
    }

    /// Replicas that are written at the same time spread over volumes of equal size.
    #[test]
    fn writers_spread() {
        let mut volumes = [3, 3, 3].map(|writers| Candidate {
            volume: 0,
            is_other_class: false,
            available_bytes: 1 << 30,
            writers,
            repairs: 0,
        });
        for (number, volume) in volumes.iter_mut().enumerate() {
            volume.volume = number;
        }
        for _ in 0..9 {
            let first = order(volumes.to_vec()).next().unwrap();
            volumes[first].writers += 1;
        }
        assert!(volumes.iter().all(|it| it.writers == 6), "{volumes:?}");
    }
}
