//! Identifiers. Each is its own type, so that one cannot be passed in place of another.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty, $format:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $format, self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "(", $format, ")"), self.0)
            }
        }
    };
}

id!(
    /// A cluster, made once by `harvestfs init`. Data directories carry it, so that a part of one
    /// cluster never joins another.
    ClusterId, u128, "{:032x}"
);
id!(
    /// A file, directory, symlink, FIFO, socket or device. Never reused within a cluster.
    InodeId, u64, "{}"
);
id!(
    /// A block. Never reused within a cluster.
    BlockId, u64, "{:016x}"
);
id!(
    /// A client's session with the namenode; the owner of its open blocks and open files.
    SessionId, u64, "{}"
);
id!(
    /// A datanode, as numbered by the namenode. Stable across restarts and reimages of the server.
    NodeId, u32, "{}"
);
id!(
    /// One formatted volume. A reimaged disk comes back with a new one.
    StorageId, u128, "{:032x}"
);

impl InodeId {
    /// The root directory.
    pub const ROOT: Self = Self(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_for_people_and_for_debugging() {
        assert_eq!(BlockId(255).to_string(), "00000000000000ff");
        assert_eq!(format!("{:?}", NodeId(7)), "NodeId(7)");
    }
}
