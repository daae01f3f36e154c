//! Compares serialisations of a journal record: `cargo run --release --bin serialisation`.
//!
//! The record is the one that a small file costs: created and committed in one step, with two extents. In memory it
//! takes about 250 bytes, names included.

#![forbid(unsafe_code)]

use std::error::Error;
use std::hint::black_box;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

const RECORDS: u64 = 1000;
const ROUNDS: u32 = 200;
const RUNS: usize = 5;

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
enum Command {
    Unlink {
        parent: u64,
        name: String,
    },
    Commit {
        request: Request,
        parent: u64,
        name: String,
        mode: u32,
        owner: (u32, u32),
        modified: Time,
        extents: Vec<Extent>,
        attributes: Vec<(String, Vec<u8>)>,
    },
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Request {
    session: u64,
    number: u64,
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Time {
    seconds: i64,
    nanoseconds: u32,
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Extent {
    file_offset_bytes: u64,
    len_bytes: u64,
    block: u64,
    block_offset_bytes: u64,
    checksum: u32,
}

/// A record with numbers as large as in a namespace of some million files.
fn record(n: u64) -> Command {
    let extent = |index: u64| Extent {
        file_offset_bytes: index * 4096,
        len_bytes: 4096,
        block: 1_000_000 + n / 50,
        block_offset_bytes: n * 8192 % (256 << 20) + index * 4096,
        checksum: (n as u32).wrapping_mul(0x9e37_79b9) ^ index as u32,
    };
    Command::Commit {
        request: Request {
            session: n.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            number: n,
        },
        parent: 3_000_000 + n / 40,
        name: format!("checkpoint-worker-{n:05}.part"),
        mode: 0o100_644,
        owner: (1000, 1000),
        modified: Time {
            seconds: 1_795_000_000 + n as i64,
            nanoseconds: (n as u32).wrapping_mul(7919) % 1_000_000_000,
        },
        extents: vec![extent(0), extent(1)],
        attributes: vec![(
            "user.harvestfs.replication".to_owned(),
            b"durability=strict;copies=3".to_vec(),
        )],
    }
}

type Bytes = Vec<u8>;
type Encode = fn(&Command, Bytes) -> Result<Bytes, Box<dyn Error>>;
type Decode = fn(&[u8]) -> Result<Command, Box<dyn Error>>;

/// Name, encoder, decoder. The encoders append to the given buffer.
const FORMATS: [(&str, Encode, Decode); 4] = [
    (
        "postcard 1.1",
        |record, buffer| Ok(postcard::to_extend(record, buffer)?),
        |bytes| Ok(postcard::from_bytes(bytes)?),
    ),
    (
        "bincode 2.0.1, standard (variable-length numbers)",
        |record, mut buffer| {
            let config = bincode::config::standard();
            bincode::serde::encode_into_std_write(record, &mut buffer, config)?;
            Ok(buffer)
        },
        |bytes| {
            let config = bincode::config::standard();
            Ok(bincode::serde::decode_from_slice(bytes, config)?.0)
        },
    ),
    (
        "bincode 2.0.1, legacy (fixed-length numbers)",
        |record, mut buffer| {
            let config = bincode::config::legacy();
            bincode::serde::encode_into_std_write(record, &mut buffer, config)?;
            Ok(buffer)
        },
        |bytes| {
            let config = bincode::config::legacy();
            Ok(bincode::serde::decode_from_slice(bytes, config)?.0)
        },
    ),
    (
        "rmp-serde 1.3 (MessagePack)",
        |record, mut buffer| {
            rmp_serde::encode::write(&mut buffer, record)?;
            Ok(buffer)
        },
        |bytes| Ok(rmp_serde::from_slice(bytes)?),
    ),
];

/// CPU time of this thread, which other programs on the machine hardly affect.
fn cpu_time_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Returns the nanoseconds per record to encode and to decode, and the mean size.
fn measure(encode: Encode, decode: Decode) -> Result<(f64, f64, f64), Box<dyn Error>> {
    let records: Vec<Command> = (0..RECORDS).map(record).collect();
    let encoded: Vec<Bytes> = (records.iter())
        .map(|record| encode(record, Bytes::new()))
        .collect::<Result<_, _>>()?;
    for (record, bytes) in records.iter().zip(&encoded) {
        if decode(bytes)? != *record {
            return Err("a record came back changed".into());
        }
    }
    let operations = f64::from(ROUNDS) * RECORDS as f64;
    let mut buffer = Bytes::new();
    let started_ns = cpu_time_ns();
    for _ in 0..ROUNDS {
        for record in &records {
            buffer.clear();
            buffer = encode(black_box(record), buffer)?;
            black_box(&buffer);
        }
    }
    let encode_ns = (cpu_time_ns() - started_ns) / operations;
    let started_ns = cpu_time_ns();
    for _ in 0..ROUNDS {
        for bytes in &encoded {
            black_box(decode(black_box(bytes))?);
        }
    }
    let decode_ns = (cpu_time_ns() - started_ns) / operations;
    let bytes: usize = encoded.iter().map(Vec::len).sum();
    Ok((encode_ns, decode_ns, bytes as f64 / RECORDS as f64))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("| format | encode | decode | size |\n|---|---|---|---|");
    for (name, encode, decode) in FORMATS {
        let (mut encode_ns, mut decode_ns, mut bytes) = (Vec::new(), Vec::new(), 0.0);
        for _ in 0..RUNS {
            let measured = measure(encode, decode)?;
            encode_ns.push(measured.0);
            decode_ns.push(measured.1);
            bytes = measured.2;
        }
        println!(
            "| {name} | {:.0} ns | {:.0} ns | {bytes:.0} bytes |",
            median(encode_ns),
            median(decode_ns)
        );
    }
    Ok(())
}
