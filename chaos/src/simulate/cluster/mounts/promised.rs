//! The required answers to calls on mounts, with any kernel: those of a file system on one machine.

use std::collections::BTreeMap;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::history::{Answer, Call, DIRECTORIES, SLOTS};

/// The required answer to each of these calls; `None` if it is not checked.
#[must_use]
pub fn promised(calls: &[Call]) -> Vec<Option<Answer>> {
    let mut system = System::default();
    calls.iter().map(|call| system.answer(call)).collect()
}

/// A file system on one machine. Files have numbers, which are never reused.
#[derive(Default)]
struct System {
    names: BTreeMap<String, usize>,
    files: Vec<Vec<u8>>,
    open: [Option<(usize, OFlags)>; SLOTS],
}

impl System {
    fn file(&self, slot: usize) -> Option<(usize, OFlags)> {
        self.open[slot]
    }

    /// The error for a path that does not exist: it is below a file, or there is no such name.
    fn missing(&self, path: &str) -> Errno {
        let above = path.rsplit_once('/').map_or("", |(above, _)| above);
        match self.names.contains_key(above) {
            true => Errno::NOTDIR,
            false => Errno::NOENT,
        }
    }

    fn stat(&self, file: usize) -> Answer {
        let names = self.names.values().filter(|it| **it == file).count();
        Answer::Stat(self.files[file].len() as u64, names as u32)
    }

    fn answer(&mut self, call: &Call) -> Option<Answer> {
        Some(match call {
            Call::Open {
                slot, path, mode, ..
            } => return self.open(*slot, path, *mode),
            Call::Close(slot) => {
                self.open[*slot] = None;
                Answer::Done
            }
            Call::Read(slot, offset, length) => {
                let (file, mode) = self.file(*slot)?;
                if mode.contains(OFlags::WRONLY) {
                    return Some(Answer::Refused(Errno::BADF));
                }
                let bytes = &self.files[file];
                let from = (*offset as usize).min(bytes.len());
                let to = from.saturating_add(*length).min(bytes.len());
                Answer::Read(bytes[from..to].to_vec())
            }
            Call::Write(slot, offset, bytes) => {
                let (file, mode) = self.file(*slot)?;
                if !mode.intersects(OFlags::WRONLY | OFlags::RDWR) {
                    return Some(Answer::Refused(Errno::BADF));
                }
                let at = match mode.contains(OFlags::APPEND) {
                    true => self.files[file].len(),
                    false => *offset as usize,
                };
                self.write(file, at, bytes)
            }
            Call::WriteMapped(slot, offset, bytes) => {
                let (file, _) = self.file(*slot)?;
                self.write(file, *offset as usize, bytes)
            }
            Call::Truncate(slot, size) => {
                let (file, mode) = self.file(*slot)?;
                if !mode.intersects(OFlags::WRONLY | OFlags::RDWR) {
                    return Some(Answer::Refused(Errno::INVAL));
                }
                self.files[file].resize(*size as usize, 0);
                Answer::Done
            }
            Call::Sync(_) => Answer::Done,
            Call::StatOpen(slot) => self.stat(self.file(*slot)?.0),
            Call::Stat(_, path) => match self.names.get(path) {
                Some(file) => self.stat(*file),
                None => Answer::Refused(self.missing(path)),
            },
            Call::Rename(_, from, to) => {
                let Some(&file) = self.names.get(from) else {
                    return Some(Answer::Refused(Errno::NOENT));
                };
                // Renaming one name of a file to another name of the same file does nothing.
                if self.names.get(to) != Some(&file) {
                    self.names.remove(from);
                    self.names.insert(to.clone(), file);
                }
                Answer::Done
            }
            Call::Link(_, from, to) => match self.names.get(from) {
                None => Answer::Refused(Errno::NOENT),
                Some(_) if self.names.contains_key(to) => Answer::Refused(Errno::EXIST),
                Some(&file) => {
                    self.names.insert(to.clone(), file);
                    Answer::Done
                }
            },
            Call::Unlink(_, path) if DIRECTORIES.contains(&path.as_str()) => {
                Answer::Refused(Errno::ISDIR)
            }
            Call::Unlink(_, path) => match self.names.remove(path) {
                Some(_) => Answer::Done,
                None => Answer::Refused(Errno::NOENT),
            },
            Call::List(_, directory) => {
                let within = self.names.keys().filter_map(|path| {
                    let (above, name) = path.split_once('/')?;
                    (above == directory).then(|| name.to_owned())
                });
                Answer::Names(within.collect())
            }
        })
    }

    fn open(&mut self, slot: usize, path: &str, mode: OFlags) -> Option<Answer> {
        let file = match self.names.get(path) {
            Some(_) if mode.contains(OFlags::CREATE | OFlags::EXCL) => {
                return Some(Answer::Refused(Errno::EXIST));
            }
            Some(&file) => file,
            None if mode.contains(OFlags::CREATE) => {
                self.files.push(Vec::new());
                self.names.insert(path.to_owned(), self.files.len() - 1);
                self.files.len() - 1
            }
            None => return Some(Answer::Refused(Errno::NOENT)),
        };
        if mode.contains(OFlags::TRUNC) {
            self.files[file].clear();
        }
        self.open[slot] = Some((file, mode));
        Some(Answer::Done)
    }

    fn write(&mut self, file: usize, at: usize, bytes: &[u8]) -> Answer {
        let held = &mut self.files[file];
        held.resize(held.len().max(at + bytes.len()), 0);
        held[at..at + bytes.len()].copy_from_slice(bytes);
        Answer::Written(bytes.len())
    }
}
