//! Messages from CRIU to a page server. The protocol is that of `criu/page-xfer.c`, and has no
//! specification. Messages have 24 bytes, or 32 since CRIU 4.2; the first message reveals which.

use crate::pagemap::Run;

/// Commands, in the lower half of a message's first number.
pub(crate) const OPEN: u32 = 4;
pub(crate) const ADD: u32 = 6;
pub(crate) const CLOSE: [u32; 2] = [0x1023, 0x1024];

/// A message from CRIU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The following pages belong to the map whose image has this name. Requires an answer.
    Open(String),
    /// A run of pages. The pages themselves follow if the run is flagged as present.
    Add(Run),
    /// The end. Requires an answer once everything is stored.
    Close,
}

/// The layout of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Page counts have 32 bits (until CRIU 4.1).
    Narrow,
    /// Page counts have 64 bits (since CRIU 4.2).
    Wide,
}

impl Layout {
    /// Length in bytes of a narrow message, and of the start of any message.
    pub const NARROW_BYTES: usize = 24;
    const WIDE_BYTES: usize = 32;

    /// Detects the layout from the start of the first message. If the message opens a map, a wide one has at
    /// offset 16 the address, which is 0, and a narrow one the map, which never is. Otherwise it is the end,
    /// from a CRIU that has sent nothing, and looks the same in both layouts.
    #[must_use]
    pub fn of(start: &[u8; Self::NARROW_BYTES]) -> Self {
        let opens = start[..4] == OPEN.to_ne_bytes();
        if opens && start[16..].iter().all(|&byte| byte == 0) {
            Self::Wide
        } else {
            Self::Narrow
        }
    }

    /// Length in bytes of one message.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Narrow => Self::NARROW_BYTES,
            Self::Wide => Self::WIDE_BYTES,
        }
    }
}

impl Message {
    /// Decodes a message.
    ///
    /// # Errors
    /// A description of what is wrong with it.
    pub fn decode(bytes: &[u8], layout: Layout) -> Result<Self, &'static str> {
        let narrow = |at: usize| {
            let number = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_ne_bytes(number))
        };
        let wide = |at: usize| {
            let number = bytes.get(at..at + 8)?.try_into().ok()?;
            Some(u64::from_ne_bytes(number))
        };
        let fields = match layout {
            Layout::Narrow => (narrow(4).map(u64::from), wide(8), wide(16)),
            Layout::Wide => (wide(8), wide(16), wide(24)),
        };
        let (Some(command), (Some(pages), Some(address), Some(map))) = (narrow(0), fields) else {
            return Err("it is cut off");
        };
        // The upper half contains flags.
        match command & 0xffff {
            OPEN => match (map & 0xff, map >> 8) {
                (1, id) => Ok(Self::Open(format!("pagemap-{id}.img"))),
                (2, id) => Ok(Self::Open(format!("pagemap-shmem-{id}.img"))),
                _ => Err("a map of memory of an unknown kind"),
            },
            ADD => Ok(Self::Add(Run {
                address,
                pages,
                flags: command >> 16,
            })),
            command if CLOSE.contains(&command) => Ok(Self::Close),
            _ => Err("an unknown command"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::PRESENT;

    /// The bytes are CRIU's, on a little-endian machine, and deliberately independent of the constants above.
    #[test]
    fn messages_are_read_as_criu_lays_them_out() {
        let map = [1, 42, 0, 0, 0, 0, 0, 0];
        let shared = [2, 7, 0, 0, 0, 0, 0, 0];
        let address = [0, 0x10, 0, 0, 0, 0, 0, 0];
        let narrow = |head: [u8; 8], address: [u8; 8], map: [u8; 8]| [head, address, map].concat();
        let wide = |head: [u8; 8], pages: [u8; 8], address: [u8; 8], map: [u8; 8]| {
            [head, pages, address, map].concat()
        };
        let three = [3, 0, 0, 0, 0, 0, 0, 0];
        let run = Run {
            address: 0x1000,
            pages: 3,
            flags: PRESENT,
        };
        let opened = Message::Open("pagemap-42.img".into());
        let shared_opened = Message::Open("pagemap-shmem-7.img".into());
        for (bytes, layout, expected) in [
            (
                narrow([4, 0, 0, 0, 0, 0, 0, 0], [0; 8], map),
                Layout::Narrow,
                &opened,
            ),
            (
                wide([4, 0, 0, 0, 0, 0, 0, 0], [0; 8], [0; 8], map),
                Layout::Wide,
                &opened,
            ),
            (
                narrow([4, 0, 0, 0, 0, 0, 0, 0], [0; 8], shared),
                Layout::Narrow,
                &shared_opened,
            ),
            (
                narrow([6, 0, 4, 0, 3, 0, 0, 0], address, map),
                Layout::Narrow,
                &Message::Add(run),
            ),
            (
                wide([6, 0, 4, 0, 0, 0, 0, 0], three, address, map),
                Layout::Wide,
                &Message::Add(run),
            ),
            (
                narrow([0x23, 0x10, 0, 0, 0, 0, 0, 0], [0; 8], [0; 8]),
                Layout::Narrow,
                &Message::Close,
            ),
            (
                narrow([0x24, 0x10, 0, 0, 0, 0, 0, 0], [0; 8], [0; 8]),
                Layout::Narrow,
                &Message::Close,
            ),
        ] {
            assert_eq!(Message::decode(&bytes, layout).as_ref(), Ok(expected));
            let start = bytes.first_chunk().expect("it is long enough");
            if *expected == opened {
                assert_eq!(Layout::of(start), layout);
            }
            assert!(Message::decode(&bytes[..bytes.len() - 1], layout).is_err());
        }
        let unknown = narrow([5, 0, 0, 0, 0, 0, 0, 0], [0; 8], map);
        assert!(Message::decode(&unknown, Layout::Narrow).is_err());
    }
}
