//! Completes or removes, at the end of a command, what it has begun to create in the cluster.

use std::time::Duration;

use anyhow::Context;
use futures::stream::{self, StreamExt};
use harvestfs_client::ClientError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::AttrChanges;
use harvestfs_protocol::name::Name;
use tokio::time::timeout;

use super::failures::is_unanswered;
use super::{Files, Interrupted, names};

/// Maximum time that a command that a signal ends waits for its copy to be removed. A little time remains after that,
/// in which it reports that the copy is left.
const INTERRUPTED_WAIT: Duration = Duration::from_millis(1800);

/// Number of directories whose modes are set concurrently: a signal leaves little time for thousands of them.
const DIRECTORIES_AT_A_TIME: usize = 64;

/// A file that is being created, until it is complete.
#[derive(Debug)]
pub(super) struct Half {
    /// Its directory.
    pub parent: InodeId,
    /// Its temporary name, which nothing else has.
    pub name: Name,
    /// Its path, for messages.
    pub path: Vec<u8>,
}

impl Files {
    /// Finishes what the command has begun: removes a partial copy, and sets the modes of directories.
    pub(super) async fn finish(&self, done: &anyhow::Result<()>) -> anyhow::Result<()> {
        if let Err(error) = done {
            // Before directories get their modes, which may deny this.
            let is_answered = self.remove_half(error).await;
            // Another request would also wait until its timeout.
            if !is_answered {
                return Ok(());
            }
        }
        self.finish_directories().await
    }

    /// Removes the partial copy of a command that failed, which is of no use. Returns whether a namenode answers.
    async fn remove_half(&self, failed: &anyhow::Error) -> bool {
        let is_answered = !is_unanswered(failed);
        let Some(half) = self.half.take() else {
            return is_answered;
        };
        if !is_answered {
            tell_left(&half);
            return false;
        }
        let removal = self
            .client
            .unlink(&self.credentials, half.parent, &half.name);
        let removed = if failed.is::<Interrupted>() {
            let Ok(removed) = timeout(INTERRUPTED_WAIT, removal).await else {
                tell_left(&half);
                return false;
            };
            removed
        } else {
            removal.await
        };
        match removed {
            Ok(_) => true,
            Err(error) if error.is_gone() => true,
            Err(ClientError::Fs(_)) => {
                // The namenode may have refused to create it, too.
                let found = self
                    .client
                    .lookup(&self.credentials, half.parent, &half.name)
                    .await;
                if !matches!(&found, Err(error) if error.is_gone()) {
                    tell_left(&half);
                }
                true
            }
            Err(_) => {
                tell_left(&half);
                false
            }
        }
    }

    /// Sets the modes of directories that were created for a copy, after which nothing can be created in some of them.
    /// This happens even if something could not be copied.
    async fn finish_directories(&self) -> anyhow::Result<()> {
        let mut finished = Ok(());
        let changes = stream::iter(self.made.take()).map(|(ino, mode)| {
            let changes = AttrChanges {
                mode: Some(mode),
                ..AttrChanges::default()
            };
            self.client.setattr(&self.credentials, ino, changes)
        });
        let mut changed = changes.buffer_unordered(DIRECTORIES_AT_A_TIME);
        while let Some(changed) = changed.next().await {
            match changed {
                Ok(_) => {}
                // It has been removed in the meantime.
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    let is_answered = matches!(error, ClientError::Fs(_));
                    finished = finished.and(Err(error));
                    // There would be no answer for the others either.
                    if !is_answered {
                        break;
                    }
                }
            }
        }
        finished.context("cannot give directories their modes")
    }
}

fn tell_left(half: &Half) {
    let path = names::harmless(&half.path);
    eprintln!("harvestfs: {path} may be left: remove it if it is there");
}

/// The path of `name` in the directory that contains `path`.
pub(super) fn beside(path: &[u8], name: &Name) -> Vec<u8> {
    let slashes = path.iter().rev().take_while(|&&byte| byte == b'/').count();
    let trimmed = &path[..path.len() - slashes];
    let last_slash = trimmed.iter().rposition(|&byte| byte == b'/');
    let directory = &trimmed[..last_slash.map_or(0, |slash| slash + 1)];
    [directory, name.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_in_the_directory_of_the_copy() {
        let name = Name::new(b"t").unwrap();
        for (path, expected) in [
            ("/f", "/t"),
            ("/d/f", "/d/t"),
            ("d/f//", "d/t"),
            ("/d/../f", "/d/../t"),
            ("f", "t"),
        ] {
            assert_eq!(
                beside(path.as_bytes(), &name),
                expected.as_bytes(),
                "{path}"
            );
        }
    }
}
