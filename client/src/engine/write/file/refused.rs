//! The handling of refused data: a quota has no room for it, or the cluster has no space.

use super::DirtyFile;

/// Maximum amount of data that a file holds after a refusal: that of one kernel request, and of one
/// packet. It is enough for a log that continues once there is room, and many such files take only
/// little of the shared memory.
const REFUSED_BYTES_MAX: u64 = 1 << 20;

impl DirtyFile {
    /// Whether data was refused, and no data of the file was stored since.
    pub(crate) fn is_refused(&self) -> bool {
        self.refusals > 0
    }

    /// Whether the data was refused again when it was retried.
    pub(crate) fn is_refused_again(&self) -> bool {
        self.refusals > 1
    }

    /// Whether there are appends that came after a refusal and were in no refused flush: there may be room for them.
    pub(super) fn has_untried_appends(&self) -> bool {
        self.is_refused() && self.appended.data.newest() > self.refused_through
    }

    /// Whether a flush has to succeed before the file takes more data. Otherwise its writer, which
    /// has not yet received the error, would fill the memory that others need.
    pub(crate) fn takes_no_more(&self) -> bool {
        self.is_refused() && self.held_bytes() >= REFUSED_BYTES_MAX
    }

    /// Returns the number of bytes in memory that were refused again and are not being retried now.
    pub(crate) fn refused_bytes(&self) -> u64 {
        let is_tried = [&self.written, &self.appended]
            .iter()
            .any(|lane| lane.wanted.is_some() || lane.data.is_committing());
        if self.is_refused_again() && !is_tried {
            self.held_bytes()
        } else {
            0
        }
    }

    /// Gives up data that was refused again and is not being retried, because others need the memory.
    pub(crate) fn give_up_refused(&mut self) {
        if self.refused_bytes() > 0
            && let Some(reason) = self.failure.clone()
        {
            self.give_up_all(&reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use harvestfs_protocol::error::FsError;
    use harvestfs_protocol::limits::PACKET_BYTES_MAX;
    use harvestfs_protocol::request_id::RequestId;
    use harvestfs_protocol::types::Credentials;

    use super::*;
    use crate::engine::write::file::Actions;
    use crate::engine::write::file::tests::{moment, opened, write_sent};
    use crate::engine::write::writeback::Order;
    use crate::error::ClientError;
    use crate::testing::some_time;

    fn refused() -> ClientError {
        FsError::QuotaExceeded.into()
    }

    /// Creates an open file with so many bytes in memory.
    fn holding(bytes: u64) -> DirtyFile {
        let mut file = opened();
        write(&mut file, bytes);
        file
    }

    fn write(file: &mut DirtyFile, bytes: u64) {
        let data = Bytes::from(vec![1; bytes as usize]);
        file.write(0, data, &Credentials::root(), moment());
    }

    fn append(file: &mut DirtyFile) {
        let data = Bytes::from_static(b"line");
        file.append(data, &Credentials::root(), moment());
    }

    fn advance(file: &mut DirtyFile) -> Actions {
        file.advance(false, RequestId::NONE)
    }

    /// Flushes everything, which fails with an error.
    fn fail(file: &mut DirtyFile, error: &ClientError) {
        fail_after(file, error, |_| {});
    }

    /// As [`fail`], after something happens to the file.
    fn fail_after(file: &mut DirtyFile, error: &ClientError, then: impl FnOnce(&mut DirtyFile)) {
        file.begin_flush(false, RequestId::NONE);
        let sends = advance(file).sends;
        let pieces: Vec<_> = sends
            .iter()
            .flat_map(|send| send.pieces.iter().map(|piece| (send.order, piece.id)))
            .collect();
        then(file);
        file.pieces_failed(&pieces, error, some_time());
    }

    #[test]
    fn a_file_takes_no_more_once_much_was_refused_and_until_it_is_stored() {
        let mut file = holding(REFUSED_BYTES_MAX);
        assert!(!file.takes_no_more(), "nothing was tried");
        let away = ClientError::Unreachable {
            waited: Duration::from_secs(60),
            reason: "away".into(),
        };
        fail(&mut file, &away);
        assert!(!file.takes_no_more(), "it will be stored later");
        fail(&mut file, &refused());
        assert!(file.takes_no_more());
        file.begin_flush(false, RequestId::NONE);
        assert!(file.takes_no_more(), "it is only tried");
        let sends = advance(&mut file).sends;
        write_sent(&mut file, sends);
        assert_eq!(advance(&mut file).commits.len(), 1);
        file.commit_done(Order::File);
        advance(&mut file);
        write(&mut file, REFUSED_BYTES_MAX);
        assert!(!file.takes_no_more());
    }

    #[test]
    fn a_file_takes_a_little_more_after_a_refusal() {
        let mut file = holding(10);
        fail(&mut file, &refused());
        assert!(!file.takes_no_more());
        write(&mut file, REFUSED_BYTES_MAX);
        assert!(file.takes_no_more());
    }

    #[test]
    fn what_was_refused_again_is_given_up_unless_it_is_being_tried() {
        let mut file = holding(10);
        file.give_up_refused();
        assert_eq!((file.refused_bytes(), file.held_bytes()), (0, 10));
        fail(&mut file, &refused());
        file.give_up_refused();
        assert_eq!((file.refused_bytes(), file.held_bytes()), (0, 10));
        fail(&mut file, &refused());
        assert_eq!(file.refused_bytes(), 10);
        file.want_all(RequestId::NONE);
        file.give_up_refused();
        assert_eq!((file.refused_bytes(), file.held_bytes()), (0, 10));
        fail(&mut file, &refused());
        let flush = file.begin_flush(false, RequestId::NONE);
        fail(&mut file, &refused());
        file.give_up_refused();
        assert_eq!((file.refused_bytes(), file.held_bytes()), (0, 0));
        assert_eq!(file.flushed(&flush), Some(Err(refused())));
        assert_eq!(file.losses().1, Some(refused()));
        assert!(!file.is_refused());
    }

    /// A caller that looks has them tried once.
    #[test]
    fn appends_count_as_refused_once_they_were_tried() {
        let mut file = holding(0);
        append(&mut file);
        assert!(file.uncommitted().is_definite(), "nothing is refused");
        fail(&mut file, &refused());
        assert!(file.uncommitted().is_definite(), "all of it is refused");
        append(&mut file);
        assert!(!file.uncommitted().is_definite());
        fail_after(&mut file, &refused(), append);
        assert!(!file.uncommitted().is_definite(), "one came too late");
        fail(&mut file, &refused());
        assert_eq!(file.held_bytes(), 12);
        assert!(file.uncommitted().is_definite());
    }

    #[test]
    fn what_is_refused_one_after_the_other_was_not_tried_again() {
        let mut file = holding(2 * PACKET_BYTES_MAX as u64);
        file.begin_flush(false, RequestId::NONE);
        let sends = advance(&mut file).sends;
        let pieces: Vec<_> = sends.iter().flat_map(|send| &send.pieces).collect();
        assert!(pieces.len() > 1);
        for piece in pieces {
            file.pieces_failed(&[(Order::File, piece.id)], &refused(), some_time());
        }
        assert!(file.is_refused() && !file.is_refused_again());
    }

    #[test]
    fn a_file_whose_data_was_given_up_is_written_in_bulk_as_before() {
        let mut file = holding(10);
        for _ in 0..2 {
            fail(&mut file, &refused());
        }
        file.give_up_refused();
        advance(&mut file);
        write(&mut file, 16 << 20);
        assert!(!advance(&mut file).sends.is_empty(), "it waits for a flush");
    }
}
