//! The parts of answers that are compared with the model.

use std::mem::discriminant;

use super::*;

/// Errors without their texts.
pub(super) fn plain(error: &FsError) -> std::mem::Discriminant<FsError> {
    discriminant(error)
}

/// Replies without versions, which the model does not count.
pub(super) fn without_versions(reply: MetaReply) -> MetaReply {
    let plain_attr = |mut attr: Attr| {
        attr.content_version = 0;
        attr
    };
    match reply {
        MetaReply::Attr(attr) => MetaReply::Attr(plain_attr(attr)),
        MetaReply::Removed(attr) => MetaReply::Removed(attr.map(plain_attr)),
        MetaReply::Renamed { moved, other } => MetaReply::Renamed {
            moved: plain_attr(moved),
            other: other.map(plain_attr),
        },
        MetaReply::Committed(files) => {
            let plain_file = |mut file: harvestfs_protocol::meta::FileCommitted| {
                file.attr = plain_attr(file.attr);
                file
            };
            let blank = |error| match error {
                FsError::InvalidArgument(_) => model::invalid(),
                other => other,
            };
            let files = files.into_iter();
            MetaReply::Committed(
                files
                    .map(|file| file.map(plain_file).map_err(blank))
                    .collect(),
            )
        }
        other => other,
    }
}
