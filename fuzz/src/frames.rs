//! Frames, and the messages in them between the namenode and all other parts.

use bytes::Bytes;
use harvestfs_protocol::codec::records::Records;
use harvestfs_protocol::codec::{
    FrameDecoder, FramePrefix, Hello, StreamKind, WireError, decode_frame, decode_header,
};
use harvestfs_protocol::meta::Notice;
use harvestfs_protocol::rpc::{Request, Response};
use harvestfs_protocol::transport::{RequestFrame, ServerFrame};

use crate::check_encodes;

/// The first two bytes seed the cuts of the stream, the rest is the stream. However it is cut, the decoder of a
/// stream must find what the decoder of a slice finds; the same holds for the decoder of records.
pub fn frames(input: &[u8]) {
    let Some((seed, stream)) = input.split_first_chunk::<2>() else {
        return;
    };
    let _ = Hello::decode(stream);
    let _ = stream.first().map(|kind| StreamKind::decode(*kind));
    if let Ok(prefix) = FramePrefix::decode(stream) {
        assert_eq!(prefix.encode()[..], stream[..8]);
    }
    let seed = u16::from_le_bytes(*seed);
    let whole = decode_slice(stream);
    let cut = decode_stream(stream, seed);
    assert_eq!(whole, cut);
    let whole = decode_records([stream]);
    let cut = decode_records(pieces(stream, seed));
    assert_eq!(whole, cut);
}

/// The content of records, how much of the last one is missing, and whether the end was seen.
fn decode_records<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<u8>, usize, bool) {
    let mut records = Records::default();
    let mut content = Vec::new();
    for piece in pieces {
        let mut arrived = Bytes::copy_from_slice(piece);
        while let Some(bytes) = records.next(&mut arrived, 1000) {
            content.extend_from_slice(&bytes);
        }
        assert!(arrived.is_empty() || records.ended());
    }
    (content, records.remaining(), records.ended())
}

fn pieces(stream: &[u8], seed: u16) -> impl Iterator<Item = &[u8]> {
    let mut state = u32::from(seed) | 1 << 16;
    let mut rest = stream;
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let length = (1 + (state >> 16) as usize % 64).min(rest.len());
        let (piece, after) = rest.split_at(length);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The messages up to the first invalid one, and whether there is one.
type Decoded = (Vec<RequestFrame<Request>>, bool);

fn decode_slice(mut stream: &[u8]) -> Decoded {
    let mut messages = Vec::new();
    loop {
        // Streams of requests carry no data, and the decoder of streams refuses it early.
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
    for piece in pieces(stream, seed) {
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

/// Decodes what the namenode reads: a request.
pub fn rpc_requests(input: &[u8]) {
    if let Ok(request) = decode_header::<RequestFrame<Request>>(input) {
        check_encodes(&request);
    }
}

/// Decodes what clients, datanodes, operators and other namenodes read: a reply or a notice.
pub fn rpc_replies(input: &[u8]) {
    if let Ok(reply) = decode_header::<ServerFrame<Response, Notice>>(input) {
        check_encodes(&reply);
    }
}
