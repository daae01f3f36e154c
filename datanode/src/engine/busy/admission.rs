//! Admission of requests.

use harvestfs_protocol::data::DataRequest;
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::identity::Role;

/// When to retry if there are too many streams.
const TOO_MANY_STREAMS_RETRY_MS: u32 = 200;

/// The state of the server when a request arrives.
#[derive(Clone, Debug)]
pub struct Server {
    /// The peer's maximum number of streams, if the peer has reached it.
    pub streams_of_peer_exceed: Option<u32>,
    /// The datanode is stopping.
    pub is_stopping: bool,
    /// The denial, if the server is to be left to its primary tenant.
    pub busy: Option<DataError>,
    /// There is room for another stream.
    pub has_room: bool,
}

/// The decision on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is served.
    Serve,
    /// It is denied for the primary tenant's sake.
    Busy(DataError),
    /// It is denied for another reason.
    Deny(DataError),
    /// It is not answered: the peer may not ask for this.
    Ignore,
}

/// Decides whether a request is served.
pub fn admit(peer: Role, request: &DataRequest, server: Server) -> Admission {
    if peer == Role::Admin && !matches!(request, DataRequest::Read(_)) {
        return Admission::Ignore;
    }
    if let Some(max) = server.streams_of_peer_exceed {
        return Admission::Deny(DataError::TooManyStreams { max });
    }
    if server.is_stopping {
        return Admission::Deny(DataError::Stopping);
    }
    match (request, server.busy) {
        (DataRequest::Read(_) | DataRequest::Write(_), Some(denial)) => {
            return Admission::Busy(denial);
        }
        // Written data is made safe even while the server is busy: that is little work, and the writer cannot continue
        // elsewhere before it is done. Loans are denied where they are made.
        (DataRequest::Seal(_) | DataRequest::ShortCircuit { .. }, _) | (_, None) => {}
    }
    if !server.has_room {
        return Admission::Deny(DataError::Busy {
            retry_after_ms: TOO_MANY_STREAMS_RETRY_MS,
        });
    }
    Admission::Serve
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::data::{ReadRequest, SealRequest};
    use harvestfs_protocol::ids::BlockId;
    use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenSigner};

    use super::*;

    fn free() -> Server {
        Server {
            streams_of_peer_exceed: None,
            is_stopping: false,
            busy: None,
            has_room: true,
        }
    }

    fn token() -> BlockToken {
        let key = TokenKey {
            key_id: 1,
            secret: [7; 32],
        };
        TokenSigner::new(&key).sign(BlockId(1), Right::Read, 0)
    }

    fn read() -> DataRequest {
        DataRequest::Read(ReadRequest {
            block: BlockId(1),
            token: token(),
            block_offset: 0,
            length_bytes: 1,
        })
    }

    fn seal() -> DataRequest {
        DataRequest::Seal(SealRequest {
            block: BlockId(1),
            token: token(),
            length_bytes: 1,
        })
    }

    #[test]
    fn a_busy_server_seals_and_serves_nothing_else() {
        let denial = DataError::Busy { retry_after_ms: 9 };
        let busy = Server {
            busy: Some(denial.clone()),
            ..free()
        };
        for role in [Role::Client, Role::Datanode, Role::Admin] {
            let admission = admit(role, &read(), busy.clone());
            assert_eq!(admission, Admission::Busy(denial.clone()));
            assert_eq!(admit(role, &read(), free()), Admission::Serve);
        }
        assert_eq!(admit(Role::Client, &seal(), busy), Admission::Serve);
        assert_eq!(admit(Role::Admin, &seal(), free()), Admission::Ignore);
    }

    #[test]
    fn the_reason_that_lasts_longest_is_said() {
        let mut server = Server {
            streams_of_peer_exceed: Some(5),
            is_stopping: true,
            busy: Some(DataError::Busy { retry_after_ms: 9 }),
            has_room: false,
        };
        let mut said = |change: fn(&mut Server)| {
            let admission = admit(Role::Client, &read(), server.clone());
            change(&mut server);
            admission
        };
        let too_many = DataError::TooManyStreams { max: 5 };
        let reasons = [
            said(|it| it.streams_of_peer_exceed = None),
            said(|it| it.is_stopping = false),
            said(|it| it.busy = None),
            said(|it| it.has_room = true),
            said(|_| {}),
        ];
        let no_room = DataError::Busy {
            retry_after_ms: TOO_MANY_STREAMS_RETRY_MS,
        };
        let expected = [
            Admission::Deny(too_many),
            Admission::Deny(DataError::Stopping),
            Admission::Busy(DataError::Busy { retry_after_ms: 9 }),
            Admission::Deny(no_room),
            Admission::Serve,
        ];
        assert_eq!(reasons, expected);
    }
}
