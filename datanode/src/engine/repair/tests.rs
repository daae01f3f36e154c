use harvestfs_protocol::data::round_up_to_chunk;
use proptest::prelude::*;

use super::*;

const CHUNK: u64 = CHUNK_BYTES as u64;

/// How a source behaves.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// It sends packets of so many chunks, and fails after so many packets.
    Sends {
        chunks: u64,
        packets: u64,
        damaged: bool,
    },
    /// It sends an unexpected packet after so many packets.
    Confuses { packets: u64, what: u8 },
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        (1u64..5, 0u64..8, any::<bool>()).prop_map(|(chunks, packets, damaged)| Source::Sends {
            chunks,
            packets,
            damaged
        }),
        (0u64..4, 0u8..5).prop_map(|(packets, what)| Source::Confuses { packets, what }),
    ]
}

fn data(block_offset: u64) -> ReadPacket {
    ReadPacket::Data {
        block_offset,
        checksums: vec![7],
    }
}

/// The packet that a source sends for `offset`, and what it carries.
fn packet(source: Source, sent: u64, offset: u64, end: u64) -> Result<(ReadPacket, u64), Trouble> {
    match source {
        Source::Sends {
            packets, damaged, ..
        } if sent >= packets => Err(if damaged {
            Trouble::Damaged
        } else {
            Trouble::Source
        }),
        Source::Sends { chunks, .. } => Ok((data(offset), (chunks * CHUNK).min(end - offset))),
        Source::Confuses { packets, .. } if sent < packets => {
            Ok((data(offset), CHUNK.min(end - offset)))
        }
        Source::Confuses { what, .. } => Ok(match what {
            0 => (data(offset + CHUNK), CHUNK),
            1 => (data(offset), 0),
            2 => (data(offset), CHUNK - 1),
            3 => (data(offset), end - offset + CHUNK),
            _ => (data(offset), PACKET_BYTES_MAX as u64 + CHUNK),
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whatever the sources do, each is asked at most once, in order; the data written is the block from its
    /// beginning, without a gap, from verified packets that fit; and the replica is sealed exactly when it is
    /// complete.
    #[test]
    fn what_is_sealed_is_the_block(
        chunks in 0u64..20,
        missing_bytes in 0u64..CHUNK,
        sources in prop::collection::vec(source(), 0..6),
    ) {
        let length_bytes = (chunks * CHUNK).saturating_sub(missing_bytes);
        let end = round_up_to_chunk(length_bytes);
        let mut fetch = Fetch::new(length_bytes, sources.len());
        let mut written = Vec::<(u64, u64)>::new();
        let mut asked = Vec::new();
        let is_sealed = 'repair: loop {
            let (source, offset) = match fetch.next() {
                Step::Seal => break true,
                Step::GiveUp => break false,
                Step::Ask { source, offset, length_bytes: wanted_bytes } => {
                    prop_assert_eq!(offset + wanted_bytes, length_bytes);
                    (source, offset)
                }
            };
            prop_assert_eq!(source, asked.len());
            asked.push(source);
            prop_assert_eq!(offset, written.iter().map(|(_, bytes)| bytes).sum::<u64>());
            let mut sent = 0;
            while !fetch.is_complete() {
                let trouble = match packet(sources[source], sent, fetch.offset(), end) {
                    Err(trouble) => trouble,
                    Ok((packet, bytes)) => match fetch.accept(packet, bytes as usize) {
                        Some(checksums) => {
                            prop_assert_eq!(checksums, vec![7]);
                            written.push((fetch.offset(), bytes));
                            fetch.wrote(bytes);
                            sent += 1;
                            continue;
                        }
                        None => Trouble::Source,
                    },
                };
                match fetch.failed(trouble) {
                    After::GoOn => {}
                    After::BeginAnew => written.clear(),
                    After::Fail => break 'repair false,
                }
                break;
            }
        };
        let mut next = 0;
        for (offset, bytes) in written {
            prop_assert_eq!(offset, next);
            prop_assert!(bytes > 0 && bytes % CHUNK == 0);
            next += bytes;
        }
        prop_assert!(next <= end);
        prop_assert_eq!(is_sealed, next == end && !sources.is_empty());
        prop_assert!(is_sealed || asked.len() == sources.len(), "a source was not asked");
    }
}

#[test]
fn trouble_of_its_own_ends_a_repair() {
    let mut fetch = Fetch::new(9000, 3);
    assert!(matches!(fetch.next(), Step::Ask { source: 0, .. }));
    assert_eq!(fetch.failed(Trouble::Here), After::Fail);
    assert_eq!(fetch.failed(Trouble::BusyHere), After::Fail);
}

#[test]
fn what_is_no_data_is_not_accepted() {
    let fetch = Fetch::new(9000, 1);
    let failed = ReadPacket::Failed(harvestfs_protocol::error::DataError::NoSpace);
    assert_eq!(fetch.accept(failed, CHUNK_BYTES), None);
}
