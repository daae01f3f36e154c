//! The actual content of the datanodes' disks, independent of what the namenode reports.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;

use crate::Cluster;

impl Cluster {
    /// The names of the files of sealed replicas that a datanode has now: the same for each replica of a
    /// block.
    ///
    /// # Panics
    /// When its volume cannot be read.
    #[must_use]
    pub fn sealed_replicas(&self, number: usize) -> BTreeSet<OsString> {
        let sealed = self.path(&Self::datanode(number)).join("volume/sealed");
        let directories = fs::read_dir(sealed).expect("its volume");
        let files = directories.flat_map(|directory| {
            let directory = directory.expect("an entry").path();
            fs::read_dir(directory).expect("a directory")
        });
        files
            .map(|file| file.expect("an entry").file_name())
            .collect()
    }
}
