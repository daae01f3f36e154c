//! What CRIU says to a page server. The protocol is that of `criu/page-xfer.c`, which has no document of
//! its own. Messages have 24 bytes, or 32 since CRIU 4.2; the first one shows which.

use crate::pagemap::Run;

/// Commands, in the lower half of a message's first number.
pub(crate) const OPEN: u32 = 4;
pub(crate) const ADD: u32 = 6;
pub(crate) const CLOSE: [u32; 2] = [0x1023, 0x1024];

/// What CRIU says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// What follows is in the memory of this map, which is the name of its image. To be answered.
    Open(String),
    /// A run of pages. They follow when the run is present.
    Add(Run),
    /// That was all. To be answered when it is stored.
    Close,
}

/// How messages are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Numbers of pages have 32 bits: until CRIU 4.1.
    Narrow,
    /// They have 64 bits: since CRIU 4.2.
    Wide,
}

impl Layout {
    /// Of a narrow message, and the start of any.
    pub const NARROW_BYTES: usize = 24;
    const WIDE_BYTES: usize = 32;

    /// From the start of the first message. When it opens a map: where a wide message has an address,
    /// which is 0 then, a narrow one has the map, which never is. Otherwise it is the end, by a CRIU that
    /// has sent nothing, and that is the same in both.
    #[must_use]
    pub fn of(start: &[u8; Self::NARROW_BYTES]) -> Self {
        let opens = start[..4] == OPEN.to_ne_bytes();
        if opens && start[16..].iter().all(|&byte| byte == 0) {
            Self::Wide
        } else {
            Self::Narrow
        }
    }

    /// Of one message.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Narrow => Self::NARROW_BYTES,
            Self::Wide => Self::WIDE_BYTES,
        }
    }
}

impl Message {
    /// From its bytes.
    ///
    /// # Errors
    /// What is wrong with it.
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
        // Flags are in the upper half.
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
