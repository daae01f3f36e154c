//! Block streams.

use harvestfs_protocol::codec::decode_header;
use harvestfs_protocol::data::{
    DataRequest, Opening, Packet, ReadPacket, SealReply, ShortCircuitReply, WriteAck,
};
use harvestfs_protocol::short_circuit::FileRequest;
use harvestfs_protocol::token::{Right, TokenKey, TokenVerifier};

use crate::check_encodes;

/// The first byte selects the message of a block stream that the rest represents. A token that the namenode did not
/// sign is never accepted.
pub fn data_messages(input: &[u8]) {
    let Some((kind, header)) = input.split_first() else {
        return;
    };
    match kind % 7 {
        0 => {
            if let Ok(opening) = decode_header::<Opening>(header) {
                check_encodes(&opening);
                check_token(&opening.body);
            }
        }
        1 => {
            if let Ok(packet) = decode_header::<Packet>(header) {
                check_encodes(&packet);
            }
        }
        2 => {
            if let Ok(ack) = decode_header::<WriteAck>(header) {
                check_encodes(&ack);
            }
        }
        3 => {
            if let Ok(packet) = decode_header::<ReadPacket>(header) {
                check_encodes(&packet);
            }
        }
        // A `short_circuit::FileReply` has the same type.
        4 => {
            if let Ok(reply) = decode_header::<SealReply>(header) {
                check_encodes(&reply);
            }
        }
        5 => {
            if let Ok(request) = decode_header::<FileRequest>(header) {
                check_encodes(&request);
            }
        }
        _ => {
            if let Ok(reply) = decode_header::<ShortCircuitReply>(header) {
                check_encodes(&reply);
            }
        }
    }
}

fn check_token(request: &DataRequest) {
    let (token, block, right) = match request {
        DataRequest::Write(write) => (&write.token, write.block, Right::Write),
        DataRequest::Read(read) => (&read.token, read.block, Right::Read),
        DataRequest::Seal(seal) => (&seal.token, seal.block, Right::Write),
        // It needs no token.
        DataRequest::ShortCircuit { .. } => return,
    };
    // No seed is signed with this key.
    let verifier = TokenVerifier::new(&[TokenKey {
        key_id: 1,
        secret: *b"thirty-two bytes nobody else has",
    }]);
    assert!(verifier.verify(token, block, right, 0).is_err());
}
