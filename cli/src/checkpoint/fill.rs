//! `harvestfs checkpoint fill`: a process with memory to checkpoint, for measurements and tests.
//!
//! It counts in `DIR/count`, which shows that it makes progress, and executes the requests in `DIR/ask`: an
//! increasing number and a command. It answers in `DIR/done` with the number and a result.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use harvestfs_checkpoint::page::PAGE_BYTES;

use crate::units::Size;

const TICK: Duration = Duration::from_millis(10);

/// Arguments of `harvestfs checkpoint fill`.
#[derive(Debug, Args)]
pub struct FillArgs {
    /// How much memory.
    bytes: Size,
    /// Where to count, and to be asked.
    directory: PathBuf,
}

/// Runs it, until it is killed.
pub fn run(command: &FillArgs) -> anyhow::Result<()> {
    let pages = usize::try_from(command.bytes.0)? / PAGE_BYTES;
    let mut memory = vec![0u8; pages * PAGE_BYTES];
    let mut random = Random(1);
    for page in 0..pages {
        random.fill(page_of(&mut memory, page));
    }
    let mut answered = 0;
    for count in 0u64.. {
        replace(&command.directory.join("count"), &count.to_string())?;
        if let Some((number, ask)) = asked(&command.directory)
            && number > answered
        {
            answered = number;
            let answer = answer(&ask, &mut memory, &mut random)?;
            replace(
                &command.directory.join("done"),
                &format!("{number} {answer}"),
            )?;
        }
        sleep(TICK);
    }
    Ok(())
}

/// `change PERCENT scattered|together` rewrites so much of the memory; `digest` tells its SHA-256.
fn answer(ask: &str, memory: &mut [u8], random: &mut Random) -> anyhow::Result<String> {
    let pages = memory.len() / PAGE_BYTES;
    let words: Vec<&str> = ask.split_whitespace().collect();
    match words[..] {
        ["change", percent, how] => {
            let percent: usize = percent.parse()?;
            let changed = pages * percent / 100;
            let first = random.below(pages - changed + 1);
            for number in 0..changed {
                let page = match how {
                    "scattered" => number * pages / changed,
                    _ => first + number,
                };
                random.fill(page_of(memory, page));
            }
            Ok("changed".to_owned())
        }
        ["digest"] => Ok(harvestfs_checkpoint::image::sha256(memory)),
        _ => anyhow::bail!("`{ask}` is not something to ask for"),
    }
}

fn page_of(memory: &mut [u8], page: usize) -> &mut [u8] {
    &mut memory[page * PAGE_BYTES..][..PAGE_BYTES]
}

fn asked(directory: &Path) -> Option<(u64, String)> {
    let text = fs::read_to_string(directory.join("ask")).ok()?;
    let (number, ask) = text.split_once(' ')?;
    Some((number.parse().ok()?, ask.to_owned()))
}

/// Writes a file so that no reader sees half of it. Not durable: it says what a running process does.
pub fn replace(path: &Path, text: &str) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// xorshift64: pages that differ, quickly.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn fill(&mut self, page: &mut [u8]) {
        for word in page.as_chunks_mut::<8>().0 {
            *word = self.next().to_ne_bytes();
        }
    }
}
