//! Memory of the namespace engine per small file: inode, name, one extent and a share of a block.
//!
//! Run: `cargo run --release -p harvestfs-namenode --example engine_memory [files]`

use std::alloc::{GlobalAlloc, Layout, System};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};

#[path = "engine_common/mod.rs"]
mod engine_common;
#[path = "engine_common/small_files.rs"]
mod small_files;

use engine_common::Driver;
use small_files::{FILES_PER_DIRECTORY, make_small_files};

/// Counts the bytes that are currently allocated.
struct Counting;

static ALLOCATED_BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator, so its guarantees hold; the counter does not
// affect them.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`; `pointer` came from `alloc` above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Resident memory of this process in bytes, as the kernel reports it.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn main() {
    let files: u64 = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(1_000_000);
    let mut driver = Driver::new(None);
    driver.open_session();
    let allocated_before = ALLOCATED_BYTES.load(Ordering::Relaxed);
    let resident_before = resident_bytes();
    let made: Result<(), Infallible> = make_small_files(&mut driver, files, 1, |_| Ok(()));
    let Ok(()) = made;
    let allocated = ALLOCATED_BYTES.load(Ordering::Relaxed) - allocated_before;

    println!("{files} files of 4 KiB, {FILES_PER_DIRECTORY} to a directory, in shared blocks");
    let per_file = |bytes: u64| bytes as f64 / files as f64;
    println!("allocated: {:.0} bytes per file", per_file(allocated));
    if let (Some(before), Some(after)) = (resident_before, resident_bytes()) {
        let grown = after.saturating_sub(before);
        println!("resident:  {:.0} bytes per file", per_file(grown));
    }
    let counts = driver.namespace.counts();
    println!(
        "estimated: {:.0} bytes per file",
        per_file(counts.memory_bytes)
    );
    println!("{counts:?}");
    assert!(
        allocated < files * 300,
        "more than 300 bytes per file: {allocated}"
    );
}
