//! Files that are opened by their handle.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use harvestfs_tests::{Cluster, wait_until};

/// Maximum time for a file without a name to be gone after its last `close`, on a busy machine.
const GONE_WITHIN: Duration = Duration::from_secs(60);

/// The layout of the kernel's `struct file_handle`.
#[repr(C)]
#[derive(Clone)]
struct Handle {
    bytes: libc::c_uint,
    kind: libc::c_int,
    identity: [u8; Self::BYTES_MAX],
}

impl Handle {
    const BYTES_MAX: usize = 128;

    fn of(path: &Path) -> Self {
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
        let mut handle = Self {
            bytes: Self::BYTES_MAX as libc::c_uint,
            kind: 0,
            identity: [0; Self::BYTES_MAX],
        };
        let mut mount: libc::c_int = 0;
        // SAFETY: the handle has the room that it says, and both outlive the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                libc::AT_FDCWD,
                path.as_ptr(),
                &raw mut handle,
                &raw mut mount,
                0,
            )
        };
        assert_eq!(result, 0, "{:?}", std::io::Error::last_os_error());
        handle
    }

    /// Opens the file for reading, on the file system of a directory.
    fn open(&self, directory: &Path) -> std::io::Result<File> {
        let directory = File::open(directory)?;
        let mut handle = self.clone();
        // SAFETY: the handle has the length that it says, and outlives the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                directory.as_raw_fd(),
                &raw mut handle,
                libc::O_RDONLY | libc::O_CLOEXEC,
            )
        };
        if result < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let descriptor = result.try_into().expect("a descriptor");
        // SAFETY: it was just opened, and has no other owner.
        Ok(unsafe { File::from_raw_fd(descriptor) })
    }
}

/// A handle leads to its file on each mount, also after renames, until the file is gone.
#[test]
fn a_file_is_opened_by_its_handle_until_it_is_gone() {
    if !rustix::process::geteuid().is_root() {
        harvestfs_tests::skip("only root opens files by handle");
        return;
    }
    let Some((mut cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    fs::create_dir(one.join("d")).expect("mkdir");
    fs::write(one.join("d/file"), "content").expect("write");
    let (file, directory) = (Handle::of(&one.join("d/file")), Handle::of(&one.join("d")));
    let read = |mount: &Path| {
        let mut content = String::new();
        let mut opened = file.open(mount).expect("it is there");
        opened.read_to_string(&mut content).expect("read");
        assert_eq!(content, "content", "{mount:?}");
    };
    let is_gone = |handle: &Handle, mount: &Path| {
        let error = handle.open(mount).expect_err("it is gone");
        assert_eq!(error.kind(), ErrorKind::StaleNetworkFileHandle, "{mount:?}");
    };
    // The kernel has never seen it on the other mount.
    read(&other);
    fs::hard_link(one.join("d/file"), one.join("d/second")).expect("link");
    fs::remove_file(other.join("d/file")).expect("unlink");
    fs::rename(other.join("d/second"), other.join("moved")).expect("rename");
    for mount in [&one, &other] {
        read(mount);
        let opened = directory.open(mount).expect("it is there");
        assert!(opened.metadata().expect("fstat").is_dir());
    }
    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.stop("one");
    cluster.mount("one");
    read(&one);

    // Without a name, it exists as long as it is open.
    let open = File::open(one.join("moved")).expect("open");
    fs::remove_file(one.join("moved")).expect("unlink");
    read(&one);
    let files = || cluster.status()["files"].as_u64().expect("a number");
    let before = files();
    drop(open);
    // To try its handle again and again would keep it, since each attempt opens it.
    wait_until("the file is gone", GONE_WITHIN, || files() + 1 == before);
    for mount in [&one, &other] {
        is_gone(&file, mount);
    }
    fs::remove_dir(other.join("d")).expect("rmdir");
    for mount in [&one, &other] {
        is_gone(&directory, mount);
    }
}
