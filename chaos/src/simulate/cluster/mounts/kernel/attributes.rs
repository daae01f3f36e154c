//! Changes of attributes, and extended attributes, which the kernel does not cache (`fs/fuse/{dir,xattr}.c`).

use std::ffi::OsStr;

use harvestfs_fuse_mount::reply::{Attributes, Xattr};
use harvestfs_protocol::meta::AttrChanges;
use rustix::io::Errno;

use super::{Fd, Thread};

/// The size of the buffer for the value of an extended attribute.
const XATTR_BYTES: u32 = 4_096;

impl Thread {
    /// `fchmod(2)`: `fuse_do_setattr`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn chmod(&self, fd: &Fd, mode: u16) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(fd.ino)?;
        let _locked = lock.write().await;
        let changes = AttrChanges {
            mode: Some(mode),
            ..AttrChanges::default()
        };
        let (header, ino) = (self.header(), fd.ino);
        let changed = self
            .kernel
            .ask::<Attributes>(|adapter, to| adapter.setattr(header, ino, changes, to))
            .await;
        let mut state = self.kernel.state.lock();
        match changed {
            Ok(Attributes { attr, ttl }) => {
                state.change_attributes(ino, &attr, ttl, 0);
                Ok(())
            }
            Err(error) => {
                if error == Errno::INTR {
                    state.invalidate_attr(ino);
                }
                Err(error)
            }
        }
    }

    /// `fsetxattr(2)`: `fuse_setxattr`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn set_xattr(&self, fd: &Fd, name: &str, value: &[u8]) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(fd.ino)?;
        let _locked = lock.write().await;
        let (header, ino) = (self.header(), fd.ino);
        let set = self.kernel.ask::<()>(|adapter, to| {
            adapter.setxattr(header, ino, OsStr::new(name), value, 0, to);
        });
        set.await?;
        self.kernel.state.lock().invalidate_attr(ino);
        Ok(())
    }

    /// `fremovexattr(2)`: `fuse_removexattr`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn remove_xattr(&self, fd: &Fd, name: &str) -> Result<(), Errno> {
        let lock = self.kernel.inode_lock(fd.ino)?;
        let _locked = lock.write().await;
        let (header, ino) = (self.header(), fd.ino);
        let removed = self.kernel.ask::<()>(|adapter, to| {
            adapter.removexattr(header, ino, OsStr::new(name), to);
        });
        removed.await?;
        self.kernel.state.lock().invalidate_attr(ino);
        Ok(())
    }

    /// `fgetxattr(2)`: `fuse_getxattr`.
    ///
    /// # Errors
    /// As in Linux.
    pub async fn get_xattr(&self, fd: &Fd, name: &str) -> Result<Vec<u8>, Errno> {
        let (header, ino) = (self.header(), fd.ino);
        let value = self.kernel.ask::<Xattr>(|adapter, to| {
            adapter.getxattr(header, ino, OsStr::new(name), XATTR_BYTES, to);
        });
        match value.await? {
            Xattr::Value(value) => Ok(value),
            Xattr::Size(_) => Err(Errno::IO),
        }
    }
}
