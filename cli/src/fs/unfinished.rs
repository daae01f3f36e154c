//! What a command has begun to make in the cluster, when it ends.

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

/// How long a command that a signal ends waits for its copy to be removed. It has a little more time, in which it says
/// that the copy is left.
const INTERRUPTED_WAIT: Duration = Duration::from_millis(1800);

/// Directories that get their modes at the same time: a signal leaves little time for thousands of them.
const DIRECTORIES_AT_A_TIME: usize = 64;

/// What is being made, until it is whole.
#[derive(Debug)]
pub(super) struct Half {
    /// The directory that it is in.
    pub parent: InodeId,
    /// Nothing else has that name.
    pub name: Name,
    /// Its path, for messages.
    pub path: Vec<u8>,
}

impl Files {
    /// Ends what the command has begun: of what is half copied, nothing stays, and directories get their modes.
    pub(super) async fn finish(&self, done: &anyhow::Result<()>) -> anyhow::Result<()> {
        if let Err(error) = done {
            // As long as its directory is open.
            let is_answered = self.remove_half(error).await;
            // Another question would wait for as long as the one before.
            if !is_answered {
                return Ok(());
            }
        }
        self.finish_directories().await
    }

    /// Removes what a command that fails has copied half, which is of no use. Returns whether a namenode answers.
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
                // Who refuses that may have refused to make it, too.
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

    /// Gives directories that were made for a copy their modes: the end of what is made in them, also where something
    /// could not be copied.
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
                // It was removed meanwhile.
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    let is_answered = matches!(error, ClientError::Fs(_));
                    finished = finished.and(Err(error));
                    // Nobody would answer for the others either.
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

/// The path of what has this name in the same directory as what is at `path`.
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
