//! The model of the kernel with which mounts are simulated behaves like the real kernel.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use harvestfs_chaos::simulate::cluster::history::{
    Answer, Call, DIRECTORIES, MOUNTS, SLOTS, answers_of_model, random_calls,
};
use harvestfs_chaos::simulate::cluster::promised::promised;
use harvestfs_tests::Cluster;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// Number of calls in each history.
const CALLS: usize = 400;
/// Seeds of the histories that are compared, unless the variable sets their number.
const SEEDS: [u64; 6] = [1, 2, 3, 4, 5, 11];
/// Number of calls shown before one with a different answer.
const SHOWN: usize = 30;
const SEEDS_VARIABLE: &str = "HARVESTFS_TESTS_KERNEL_MODEL_SEEDS";

struct Real {
    mounts: [PathBuf; MOUNTS],
    slots: [Option<File>; SLOTS],
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).expect("an error of the kernel")
}

fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        // A program may retry this; see the exceptions in SEMANTICS.
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

/// Writes through a shared mapping. The kernel copies from a pipe, so that a missing page is an error instead of a
/// signal.
fn write_mapped(file: &File, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
    let (mut reader, mut writer) = io::pipe().expect("a pipe");
    writer.write_all(bytes).expect("a page fits into it");
    let length = (offset as usize + bytes.len()).next_multiple_of(4096);
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let address = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file,
            0,
        )?
    };
    // SAFETY: it was just mapped for writing, with this length, and has no other user.
    let mapped = unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), length) };
    let at = offset as usize;
    let written = reader.read(&mut mapped[at..at + bytes.len()]);
    // SAFETY: nothing refers to it any more.
    unsafe { rustix::mm::munmap(address, length)? };
    written.map_err(|error| errno(&error))
}

impl Real {
    fn path(&self, mount: usize, path: &str) -> PathBuf {
        self.mounts[mount].join(path)
    }

    fn file(&self, slot: usize) -> &File {
        self.slots[slot].as_ref().expect("it is open")
    }

    fn read(file: &File, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let mut read = vec![0; length];
        let mut filled = 0;
        while filled < length {
            let at = offset + filled as u64;
            let more = again(|| {
                let more = file.read_at(&mut read[filled..], at);
                more.map_err(|error| errno(&error))
            })?;
            if more == 0 {
                break;
            }
            filled += more;
        }
        read.truncate(filled);
        Ok(read)
    }

    fn answer(&mut self, call: &Call) -> Result<Answer, Errno> {
        let stat = |metadata: io::Result<fs::Metadata>| {
            let metadata = metadata.map_err(|error| errno(&error))?;
            Ok(Answer::Stat(metadata.len(), metadata.nlink() as u32))
        };
        let done = |result: io::Result<()>| match result {
            Ok(()) => Ok(Answer::Done),
            Err(error) => Err(errno(&error)),
        };
        match call {
            Call::Open {
                mount,
                slot,
                path,
                mode,
            } => {
                let path = self.path(*mount, path);
                let opened = again(|| rustix::fs::open(&path, *mode, Mode::from_raw_mode(0o644)))?;
                self.slots[*slot] = Some(File::from(opened));
                Ok(Answer::Done)
            }
            Call::Close(slot) => {
                let file = self.slots[*slot].take().expect("it is open");
                // `std` does not return the result of `close`.
                nix::unistd::close(OwnedFd::from(file))
                    .map_err(|error| Errno::from_raw_os_error(error as i32))?;
                Ok(Answer::Done)
            }
            Call::Read(slot, offset, length) => {
                Self::read(self.file(*slot), *offset, *length).map(Answer::Read)
            }
            Call::Write(slot, offset, bytes) => {
                let written = self.file(*slot).write_at(bytes, *offset);
                written.map(Answer::Written).map_err(|error| errno(&error))
            }
            Call::WriteMapped(slot, offset, bytes) => {
                write_mapped(self.file(*slot), *offset, bytes).map(Answer::Written)
            }
            Call::Truncate(slot, size) => done(self.file(*slot).set_len(*size)),
            Call::Sync(slot) => done(self.file(*slot).sync_all()),
            Call::StatOpen(slot) => stat(self.file(*slot).metadata()),
            Call::Stat(mount, path) => stat(fs::metadata(self.path(*mount, path))),
            Call::Rename(mount, from, to) => {
                done(fs::rename(self.path(*mount, from), self.path(*mount, to)))
            }
            Call::Link(mount, from, to) => done(fs::hard_link(
                self.path(*mount, from),
                self.path(*mount, to),
            )),
            Call::Unlink(mount, path) => done(fs::remove_file(self.path(*mount, path))),
            Call::List(mount, path) => {
                let mut names = Vec::new();
                for entry in fs::read_dir(self.path(*mount, path)).map_err(|error| errno(&error))? {
                    let entry = entry.map_err(|error| errno(&error))?;
                    names.push(entry.file_name().into_string().expect("ours are text"));
                }
                names.sort();
                Ok(Answer::Names(names))
            }
        }
    }
}

/// Formats calls without the data that they write.
fn shown(calls: &[Call]) -> String {
    let line = |call: &Call| match call {
        Call::Write(slot, offset, bytes) | Call::WriteMapped(slot, offset, bytes) => {
            format!("  write to {slot} at {offset}: {} bytes\n", bytes.len())
        }
        call => format!("  {call:?}\n"),
    };
    calls.iter().map(line).collect()
}

fn compare(seed: u64, mounts: [&Path; MOUNTS]) {
    let calls = random_calls(seed, CALLS);
    let modelled = answers_of_model(seed, &calls).expect("its files can be written");
    let mounts = mounts.map(|mount| mount.join(format!("history-{seed}")));
    for directory in DIRECTORIES {
        fs::create_dir_all(mounts[0].join(directory)).expect("mkdir");
    }
    let mut real = Real {
        mounts,
        slots: [const { None }; SLOTS],
    };
    let answers = modelled.into_iter().zip(promised(&calls));
    for (number, (call, (modelled, promised))) in calls.iter().zip(answers).enumerate() {
        let answer = Answer::from(real.answer(call));
        // If both give the same wrong answer, the fault is in the mount.
        let is_promised = promised.as_ref().is_none_or(|promised| *promised == answer);
        assert!(
            answer == modelled && is_promised,
            "seed {seed}, call {number}, {call:?}:\n  the kernel answers {answer:?}\n  the model answers  {modelled:?}\n  \
             promised is        {promised:?}\nbefore:\n{}",
            shown(&calls[number.saturating_sub(SHOWN)..number])
        );
    }
}

#[test]
fn the_model_of_the_kernel_answers_as_the_kernel_does() {
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let seeds = match env::var(SEEDS_VARIABLE) {
        Ok(text) => (1..=text.parse().expect("a number")).collect(),
        Err(_) => SEEDS.to_vec(),
    };
    for seed in seeds {
        compare(seed, [&one, &other]);
    }
}
