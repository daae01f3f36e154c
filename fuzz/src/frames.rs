//! Frames and what travels in them between the namenode and everybody else.

use bytes::Bytes;
use harvestfs_protocol::codec::{
    FrameDecoder, FramePrefix, Hello, StreamKind, WireError, decode_frame, decode_header,
};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::rpc::{Request, Response};
use harvestfs_protocol::transport::{RequestFrame, ServerFrame};

use crate::check_encodes;

/// The first two bytes seed the cuts of the stream, the rest is the stream. However it is cut, the
/// decoder of a stream finds what the decoder of a slice finds.
pub fn frames(input: &[u8]) {
    let Some((seed, stream)) = input.split_first_chunk::<2>() else {
        return;
    };
    let _ = Hello::decode(stream);
    let _ = stream.first().map(|kind| StreamKind::decode(*kind));
    if let Ok(prefix) = FramePrefix::decode(stream) {
        assert_eq!(prefix.encode()[..], stream[..8]);
    }
    let whole = decode_slice(stream);
    let cut = decode_stream(stream, u16::from_le_bytes(*seed));
    assert_eq!(whole, cut);
}

/// The messages up to the first that is wrong, and whether one is.
type Decoded = (Vec<RequestFrame<Request>>, bool);

fn decode_slice(mut stream: &[u8]) -> Decoded {
    let mut messages = Vec::new();
    loop {
        // Streams of requests carry no data; the decoder of streams refuses it early.
        match FramePrefix::decode(stream) {
            Ok(prefix) if prefix.data_len > 0 => return (messages, true),
            _ => {}
        }
        match decode_frame(stream) {
            Ok((message, _, rest)) => {
                messages.push(message);
                stream = rest;
            }
            Err(WireError::Truncated { .. }) => return (messages, false),
            Err(_) => return (messages, true),
        }
    }
}

fn decode_stream(stream: &[u8], seed: u16) -> Decoded {
    let mut decoder = FrameDecoder::new();
    let mut messages = Vec::new();
    let mut state = u32::from(seed) | 1 << 16;
    let mut rest = stream;
    while !rest.is_empty() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let length = (1 + (state >> 16) as usize % 64).min(rest.len());
        let (piece, after) = rest.split_at(length);
        rest = after;
        decoder.push(Bytes::copy_from_slice(piece));
        loop {
            match decoder.next_frame() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, true),
            }
        }
    }
    (messages, false)
}

/// What the namenode reads: a request.
pub fn rpc_requests(input: &[u8]) {
    if let Ok(request) = decode_header::<RequestFrame<Request>>(input) {
        check_encodes(&request);
    }
}

/// What clients, datanodes and operators read: a reply or a notice.
pub fn rpc_replies(input: &[u8]) {
    if let Ok(reply) = decode_header::<ServerFrame<Response, Notice>>(input) {
        check_encodes(&reply);
    }
}
