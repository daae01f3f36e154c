//! Disk space and recovery time after inserts, overwrites and deletes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;

use crate::child;
use crate::store::{Kind, Result, VALUE_BYTES};

pub struct Space {
    /// Space after the work, as a multiple of the remaining content.
    pub factor: f64,
    /// The same after the store was asked to reclaim space.
    pub compacted_factor: f64,
    pub memory_mib_max: u64,
    pub open_ms: u64,
    pub open_and_read_ms: u64,
}

/// Does 5 `unit`s of inserts, 5 of overwrites, 2.5 of deletes in a child that then aborts.
pub fn measure(kind: Kind, dir: &Path, unit: u64) -> Result<Space> {
    // The child ends with SIGABRT on purpose; what counts is that it reached the end.
    let filled = child::command("fill", kind, dir, unit)?
        .stderr(Stdio::inherit())
        .output()?;
    let memory_kib_max: u64 = String::from_utf8(filled.stdout)?.trim().parse()?;
    let full_bytes = allocated_bytes(dir)?;

    let recovered = child::command("recover", kind, dir, 0)?.output()?;
    let printed = String::from_utf8(recovered.stdout)?;
    let numbers: Vec<u64> = printed
        .split_whitespace()
        .map(str::parse)
        .collect::<std::result::Result<_, _>>()?;
    let &[open_ms, open_and_read_ms, count] = numbers.as_slice() else {
        return Err(format!("{}: recovery printed {printed:?}", kind.name()).into());
    };
    let content_bytes = count * (8 + VALUE_BYTES as u64);

    let compacted = child::command("compact", kind, dir, 0)?.status()?;
    if !compacted.success() {
        return Err(format!("{}: compaction failed", kind.name()).into());
    }
    Ok(Space {
        factor: full_bytes as f64 / content_bytes as f64,
        compacted_factor: allocated_bytes(dir)? as f64 / content_bytes as f64,
        memory_mib_max: memory_kib_max / 1024,
        open_ms,
        open_and_read_ms,
    })
}

fn allocated_bytes(path: &Path) -> Result<u64> {
    let metadata = fs::symlink_metadata(path)?;
    let mut bytes = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            bytes += allocated_bytes(&entry?.path())?;
        }
    }
    Ok(bytes)
}
