//! The file that stores the position of the namenode that this datanode has obeyed.
//!
//! ```text
//! harvestfs-obeyed 1
//! epoch 217000000
//! id 0123456789abcdef
//! record 12345
//! crc32 01234567               (of everything above)
//! ```

use std::fs;
use std::path::Path;

use harvestfs_protocol::timeline::{Epoch, Position};

use super::checked_text;

const OBEYED_FILE: &str = "OBEYED";
const MAGIC: &str = "harvestfs-obeyed 1";
/// More than any such file contains.
const FILE_BYTES_MAX: u64 = 1024;

/// Reads the file of a volume; `None` if there is none that can be trusted: other volumes, and other datanodes, have
/// the position as well.
pub fn read(dir: &Path) -> Option<Position> {
    let path = dir.join(OBEYED_FILE);
    if fs::metadata(&path).ok()?.len() > FILE_BYTES_MAX {
        return None;
    }
    let found = parse(&fs::read_to_string(&path).ok()?);
    if found.is_none() {
        tracing::warn!(file = %path.display(), "the file does not say which namenode was obeyed: it is damaged");
    }
    found
}

/// Writes the file durably.
pub fn write(position: Position, dir: &Path) -> std::io::Result<()> {
    checked_text::replace(&dir.join(OBEYED_FILE), &body(position))
}

fn body(position: Position) -> String {
    let Position { epoch, record } = position;
    format!(
        "{MAGIC}\nepoch {}\nid {:016x}\nrecord {record}\n",
        epoch.number, epoch.id
    )
}

fn parse(text: &str) -> Option<Position> {
    let body = checked_text::body(text).ok()?;
    let mut lines = body.lines();
    if lines.next()? != MAGIC {
        return None;
    }
    let mut field = |name: &str| lines.next()?.strip_prefix(name);
    Some(Position {
        epoch: Epoch {
            number: field("epoch ")?.parse().ok()?,
            id: u64::from_str_radix(field("id ")?, 16).ok()?,
        },
        record: field("record ")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const POSITION: Position = Position {
        epoch: Epoch {
            number: 217_000_000,
            id: 0xab,
        },
        record: 12_345,
    };

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), None);
        for record in [POSITION.record, 99_999] {
            let position = Position { record, ..POSITION };
            write(position, dir.path()).unwrap();
            assert_eq!(read(dir.path()), Some(position));
        }
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let good = checked_text::with_checksum(&body(POSITION));
        assert_eq!(parse(&good), Some(POSITION));
        for index in 0..good.len() {
            let mut bad = good.clone().into_bytes();
            bad[index] ^= 0x20;
            let text = String::from_utf8_lossy(&bad).into_owned();
            assert_eq!(parse(&text), None, "byte {index}");
            assert_eq!(parse(&good[..index]), None);
        }
    }
}
