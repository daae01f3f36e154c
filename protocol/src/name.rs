//! A checked file name.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::FsError;
use crate::limits::NAME_BYTES_MAX;

/// The name under which a directory contains its snapshots, if it has any. Listings leave it out.
pub const SNAPSHOTS_NAME: &[u8] = b".snapshot";

/// The name of a directory entry: 1 to 255 bytes, without `/` and NUL, neither `.` nor `..`.
/// Bytes, not text: POSIX names need not be UTF-8.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct Name(Box<[u8]>);

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    /// [`FsError::NameTooLong`] above 255 bytes; [`FsError::InvalidArgument`] for any other name
    /// that no directory entry can have.
    pub fn new(bytes: &[u8]) -> Result<Self, FsError> {
        if bytes.len() > NAME_BYTES_MAX {
            return Err(FsError::NameTooLong);
        }
        if bytes.is_empty() || bytes == b"." || bytes == b".." {
            return Err(FsError::InvalidArgument("not a file name".into()));
        }
        if bytes.contains(&b'/') || bytes.contains(&0) {
            return Err(FsError::InvalidArgument(
                "a file name has no '/' and no NUL".into(),
            ));
        }
        Ok(Self(bytes.into()))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::borrow::Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Vec<u8>> for Name {
    type Error = FsError;

    fn try_from(bytes: Vec<u8>) -> Result<Self, FsError> {
        Self::new(&bytes)
    }
}

impl From<Name> for Vec<u8> {
    fn from(name: Name) -> Self {
        name.0.into_vec()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&String::from_utf8_lossy(&self.0), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_no_entry_can_be_called() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
            assert!(matches!(Name::new(bad), Err(FsError::InvalidArgument(_))));
        }
        assert_eq!(Name::new(&[b'x'; 256]), Err(FsError::NameTooLong));
        assert!(Name::new(&[b'x'; 255]).is_ok());
        assert!(Name::new(&[0xff, 0xfe]).is_ok());
    }

    #[test]
    fn decoding_checks_too() {
        let bytes = postcard::to_stdvec(&b"a/b".to_vec()).unwrap();
        assert!(postcard::from_bytes::<Name>(&bytes).is_err());
    }
}
