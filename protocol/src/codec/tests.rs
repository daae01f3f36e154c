use proptest::collection::vec;
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Message {
    Ping,
    Put { id: u64, name: String },
    List(Vec<Vec<u32>>),
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        Just(Message::Ping),
        (any::<u64>(), ".{0,40}").prop_map(|(id, name)| Message::Put { id, name }),
        vec(vec(any::<u32>(), 0..8), 0..8).prop_map(Message::List),
    ]
}

fn encode(message: &Message, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    encode_frame(&mut out, message, data.len()).unwrap();
    out.extend_from_slice(data);
    out
}

#[test]
fn golden_bytes() {
    let put = Message::Put {
        id: 300,
        name: "ab".to_owned(),
    };
    let expected = [
        6, 0, 0, 0, // header length
        3, 0, 0, 0, // data length
        1, 0xac, 2, 2, b'a', b'b', // variant, id, length of the name, name
        7, 8, 9, // data
    ];
    assert_eq!(encode(&put, &[7, 8, 9]), expected);
    let hello = Hello {
        versions: Versions {
            newest: Version(0x0103),
            oldest: Version(0x0102),
        },
        release: Release::cut("1.2.3"),
    };
    let expected = b"HVFS\x03\x01\0\0\x02\x01\0\x001.2.3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    assert_eq!(hello.encode(), *expected);
    assert_eq!(StreamKind::Rpc.encode(), 1);
    assert_eq!(StreamKind::Data.encode(), 2);
}

#[test]
fn lengths_over_the_limit_are_refused_before_anything_is_read() {
    let header = (MAX_HEADER_BYTES as u32 + 1).to_le_bytes();
    let data = (MAX_DATA_BYTES as u32 + 1).to_le_bytes();
    let no_header = [header, [0; 4]].concat();
    let no_data = [[0; 4], data].concat();
    for (bytes, expected) in [(no_header, "header"), (no_data, "data")] {
        let error = decode_frame::<Message>(&bytes).unwrap_err();
        assert!(matches!(error, WireError::TooLarge { what, .. } if what == expected));
    }
}

#[test]
fn what_is_too_large_to_send_leaves_the_buffer_as_it_was() {
    let mut out = vec![1, 2, 3];
    let large = "x".repeat(MAX_HEADER_BYTES);
    let error = encode_frame(&mut out, &large, 0).unwrap_err();
    assert!(matches!(error, WireError::TooLarge { what: "header", .. }));
    let error = encode_frame(&mut out, &Message::Ping, MAX_DATA_BYTES + 1).unwrap_err();
    assert!(matches!(error, WireError::TooLarge { what: "data", .. }));
    assert_eq!(out, [1, 2, 3]);
}

#[test]
fn bytes_after_the_message_are_malformed() {
    let error = decode_header::<Message>(&[0, 0]).unwrap_err();
    assert!(matches!(error, WireError::Malformed { .. }));
}

#[test]
fn hellos_of_strangers_and_of_other_versions_are_distinguished() {
    let hello = |oldest, newest| Hello {
        versions: Versions {
            newest: Version(newest),
            oldest: Version(oldest),
        },
        release: Release::OURS,
    };
    let (ours, theirs) = (hello(13, 15), hello(16, 17));
    assert_eq!(Hello::decode(&theirs.encode()), Ok((theirs, &b""[..])));
    assert_eq!(
        ours.agree(theirs),
        Err(WireError::VersionMismatch {
            ours: ours.versions,
            theirs: theirs.versions
        })
    );
    assert_eq!(ours.agree(ours), Ok(Version(15)));
    assert_eq!(ours.agree(hello(12, 14)), Ok(Version(14)));
    let followed = [&theirs.encode()[..], b"more"].concat();
    assert_eq!(Hello::decode(&followed).unwrap(), (theirs, &b"more"[..]));
    assert!(Hello::decode(&hello(14, 13).encode()).is_err());
    // As it was before the first release.
    let (unreleased, _) = Hello::decode(b"HVFS\x0b\0\0\0").unwrap();
    assert_eq!(unreleased.versions, Versions::only(Version(11)));
    assert!(ours.agree(unreleased).is_err());
    let stranger = Hello::decode(b"GET / HT").unwrap_err();
    assert!(matches!(stranger, WireError::Malformed { .. }));
    assert_eq!(
        Hello::decode(b"HVFS\x01"),
        Err(WireError::Truncated {
            missing_bytes: HELLO_BYTES - 5
        })
    );
    let cut = &ours.encode()[..HELLO_BYTES - 1];
    assert_eq!(
        Hello::decode(cut),
        Err(WireError::Truncated { missing_bytes: 1 })
    );
}

#[test]
fn a_decoder_refuses_attached_data() {
    let mut decoder = FrameDecoder::new();
    decoder.push(encode(&Message::Ping, b"data").into());
    let error = decoder.next_frame::<Message>().unwrap_err();
    assert!(matches!(error, WireError::TooLarge { what: "data", .. }));
}

#[test]
fn a_claimed_length_allocates_nothing() {
    // A list that claims 2^60 elements, in a frame that is otherwise well-formed.
    let claim = [2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f];
    assert!(decode_header::<Message>(&claim).is_err());
    let mut decoder = FrameDecoder::new();
    let prefix = FramePrefix::new(MAX_HEADER_BYTES, 0).unwrap();
    decoder.push(Bytes::copy_from_slice(&prefix.encode()));
    assert_eq!(decoder.next_frame::<Message>(), Ok(None));
    decoder.push(Bytes::from_static(&[0; 10]));
    assert_eq!(decoder.next_frame::<Message>(), Ok(None));
    assert!(decoder.partial.capacity() < 1024);
}

proptest! {
    #[test]
    fn frames_come_back_as_they_were(message in message(), data in vec(any::<u8>(), 0..100), rest in vec(any::<u8>(), 0..10)) {
        let bytes = [encode(&message, &data), rest.clone()].concat();
        let (decoded, decoded_data, decoded_rest) = decode_frame::<Message>(&bytes).unwrap();
        prop_assert_eq!(decoded, message);
        prop_assert_eq!(decoded_data, &data);
        prop_assert_eq!(decoded_rest, &rest);
    }

    #[test]
    fn every_cut_of_a_frame_is_truncated(message in message(), data in vec(any::<u8>(), 0..20)) {
        let bytes = encode(&message, &data);
        for cut in 0..bytes.len() {
            let error = decode_frame::<Message>(&bytes[..cut]).unwrap_err();
            prop_assert!(matches!(error, WireError::Truncated { missing_bytes } if missing_bytes > 0 && missing_bytes <= bytes.len() - cut), "cut at {}: {:?}", cut, error);
        }
    }

    #[test]
    fn any_bytes_decode_or_fail_without_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = decode_frame::<Message>(&bytes);
        let _ = decode_header::<Message>(&bytes);
        let _ = Hello::decode(&bytes);
        let mut decoder = FrameDecoder::new();
        decoder.push(bytes.into());
        while let Ok(Some(_)) = decoder.next_frame::<Message>() {}
    }

    #[test]
    fn a_damaged_frame_never_panics(message in message(), position in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = encode(&message, b"data");
        let at = position.index(bytes.len());
        bytes[at] = byte;
        if let Ok((_, data, rest)) = decode_frame::<Message>(&bytes) {
            prop_assert!(data.len() + rest.len() <= bytes.len());
        }
    }

    #[test]
    fn pieces_of_any_size_give_the_same_messages(messages in vec(message(), 0..12), cuts in vec(1usize..40, 1..40), early in any::<bool>()) {
        let mut bytes = Vec::new();
        for message in &messages {
            bytes.extend(encode(message, &[]));
        }
        let mut bytes = Bytes::from(bytes);
        let mut decoder = FrameDecoder::new();
        let mut decoded: Vec<Message> = Vec::new();
        for cut in cuts.iter().cycle() {
            if bytes.is_empty() {
                break;
            }
            decoder.push(bytes.split_to((*cut).min(bytes.len())));
            // Not looking after every piece must make no difference.
            if early || cut % 2 == 0 {
                while let Some(message) = decoder.next_frame().unwrap() {
                    decoded.push(message);
                }
            }
        }
        while let Some(message) = decoder.next_frame().unwrap() {
            decoded.push(message);
        }
        prop_assert_eq!(decoded, messages);
        prop_assert!(decoder.is_at_boundary());
    }
}
