use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use bytes::Bytes;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;
use crate::codec::{StreamKind, WireError};
use crate::transport::local::{Door, OFFER_BYTES, Offer, Opener};
use crate::transport::{CloseCode, FrameReceiver, FrameSender, StreamCode, TransportError};

fn caller(offer: &Offer) -> UnixStream {
    let address = SocketAddr::from_abstract_name(offer.socket_name()).unwrap();
    let socket = UnixStream::connect_addr(&address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Whether the other side closes the socket without an answer.
fn is_turned_away(mut socket: UnixStream) -> bool {
    match socket.read(&mut [0; 1]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release
        .split(['.', '-'])
        .map(|part| part.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

/// The same secrets, for another to use.
fn copy(offer: &Offer) -> Offer {
    Offer::decode(&offer.encode()).unwrap()
}

/// What the client sends and receives with, and the server.
async fn stream(pair: &Pair) -> [(FrameSender, FrameReceiver); 2] {
    let client = pair.client.open_stream(StreamKind::Data).await.unwrap();
    assert!(client.0.is_local());
    let accepted = tokio::time::timeout(LONG, pair.server.accept_stream()).await;
    let (kind, sender, receiver) = accepted.unwrap().unwrap();
    assert!(sender.is_local());
    assert_eq!(kind, StreamKind::Data);
    [client, (sender, receiver)]
}

#[tokio::test]
async fn streams_of_both_ways_are_accepted() {
    let pair = pair().await;
    let [(mut sender, _back), (_to_client, mut receiver)] = stream(&pair).await;
    sender.send(&1_u8).await.unwrap();
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((1, 0)));

    // The side that accepted the connection opens streams over the network.
    let (mut sender, _back) = pair.server.open_stream(StreamKind::Rpc).await.unwrap();
    assert!(!sender.is_local());
    sender.send(&2_u8).await.unwrap();
    let (kind, _back, mut receiver) = pair.client.accept_stream().await.unwrap();
    assert_eq!(kind, StreamKind::Rpc);
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((2, 0)));
}

#[tokio::test]
async fn what_the_door_turns_away_goes_over_the_network() {
    let pair = pair().await;
    let mut opened = Vec::new();
    let mut local = 0;
    // More than may wait at the door.
    for number in 0..100_u8 {
        let (mut sender, back) = pair.client.open_stream(StreamKind::Data).await.unwrap();
        sender.send(&number).await.unwrap();
        local += usize::from(sender.is_local());
        opened.push((sender, back));
    }
    assert_eq!(local, 64);
    let mut received = Vec::new();
    while received.len() < opened.len() {
        let (_, _back, mut receiver) = pair.server.accept_stream().await.unwrap();
        received.push(receiver.recv::<u8>(LONG).await.unwrap().unwrap().0);
    }
    received.sort_unstable();
    assert!(received.into_iter().eq(0..100));
}

#[tokio::test]
async fn only_a_ticket_opens_a_stream_as_long_as_its_connection_is_open() {
    let door = Door::open().unwrap();
    let (offer, accepted) = door.offer();
    let mut stranger = caller(&offer);
    stranger.write_all(&[7; OFFER_BYTES]).unwrap();
    assert!(is_turned_away(stranger));
    assert!(is_turned_away(caller(&offer)), "without an answer");
    let mut of_no_kind = caller(&offer);
    let ticket = &offer.encode()[16..48];
    of_no_kind.write_all(&[ticket, b"G"].concat()).unwrap();
    assert!(is_turned_away(of_no_kind));

    let opener = Opener::new(copy(&offer));
    for kind in [StreamKind::Data, StreamKind::Rpc] {
        let _stream = opener.open(kind).await.unwrap();
        assert_eq!(accepted.accept().await.0, kind);
    }
    drop(accepted);
    assert!(opener.open(StreamKind::Data).await.is_err());
}

#[tokio::test]
async fn without_the_proof_there_is_no_stream() {
    let door = Door::open().unwrap();
    let (offer, _accepted) = door.offer();
    let mut encoded = offer.encode();
    encoded[OFFER_BYTES - 1] ^= 1;
    let opener = Opener::new(Offer::decode(&encoded).unwrap());
    let error = opener.open(StreamKind::Data).await.unwrap_err();
    assert!(error.to_string().contains("somebody else"), "{error}");
}

#[tokio::test]
async fn a_door_that_does_not_answer_is_left_alone_for_a_while() {
    let door = Door::open().unwrap();
    let (offer, accepted) = door.offer();
    let opener = Opener::new(copy(&offer));
    let mut waiting = Vec::new();
    let refused = loop {
        match opener.open(StreamKind::Data).await {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 1000, "there is no end");
    };
    assert!(matches!(refused, TransportError::Lost { .. }), "{refused}");
    accepted.accept().await;
    assert!(opener.open(StreamKind::Data).await.is_err(), "too early");
    let another = Opener::new(offer);
    another.open(StreamKind::Data).await.unwrap();
}

#[test]
fn an_offer_of_another_length_is_malformed_and_its_secrets_are_not_shown() {
    for length in (0..OFFER_BYTES).chain([OFFER_BYTES + 1]) {
        let decoded = Offer::decode(&vec![1; length]);
        assert!(matches!(decoded, Err(WireError::Malformed { .. })));
    }
    let bytes: Vec<u8> = (0..OFFER_BYTES as u8).collect();
    let offer = Offer::decode(&bytes).unwrap();
    assert_eq!(offer.encode(), bytes);
    assert_eq!(format!("{offer:?}"), "Offer { .. }");
}

#[tokio::test]
async fn descriptors_are_refused_where_the_kernel_can() {
    let door = Door::open().unwrap();
    let (offer, _accepted) = door.offer();
    let socket = caller(&offer);
    let file = tempfile::tempfile().unwrap();
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    assert!(attached.push(SendAncillaryMessage::ScmRights(&files)));
    let sent = sendmsg(
        &socket,
        &[IoSlice::new(b"x")],
        &mut attached,
        SendFlags::NOSIGNAL,
    );
    if kernel_is_at_least(6, 16) {
        assert_eq!(sent.unwrap_err(), rustix::io::Errno::PERM);
    } else {
        sent.unwrap();
        assert!(is_turned_away(socket));
    }
}

#[tokio::test]
async fn streams_end_with_their_connection() {
    let pair = pair().await;
    let [(mut sender, mut receiver), _kept] = stream(&pair).await;
    let closing = async {
        tokio::time::sleep(SHORT).await;
        pair.server.close(CloseCode::DONE, "enough");
    };
    let (received, ()) = tokio::join!(receiver.recv::<u8>(LONG), closing);
    let enough = TransportError::ClosedByPeer {
        code: CloseCode::DONE,
        reason: "enough".to_owned(),
    };
    assert_eq!(received.unwrap_err(), enough);
    // The server does not read, and will not.
    let error = loop {
        let data = Bytes::from(vec![0; 1 << 20]);
        if let Err(error) = sender.send_with_data(&(), data).await {
            break error;
        }
    };
    assert_eq!(error, enough);
}

#[tokio::test]
async fn what_still_comes_does_not_count_once_this_side_has_closed_the_connection() {
    let pair = pair().await;
    let [(mut sender, _back), (mut to_client, mut receiver)] = stream(&pair).await;
    sender.send(&1_u8).await.unwrap();
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((1, 0)));
    sender.send(&2_u8).await.unwrap();
    pair.server.close(CloseCode::NOT_ALLOWED, "no");
    let received = receiver.recv::<u8>(LONG).await;
    assert_eq!(received.unwrap_err(), TransportError::Closed);
    let sent = to_client.send(&1).await;
    assert_eq!(sent.unwrap_err(), TransportError::Closed);
}

#[tokio::test]
async fn a_stream_given_up_before_its_first_word_is_reset() {
    let pair = pair().await;
    let [client, (_to_client, mut receiver)] = stream(&pair).await;
    drop(client);
    let reset = TransportError::StreamReset {
        code: StreamCode::FAILED,
    };
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap_err(), reset);
    // Also for a receiver that waits only shortly, again and again.
    let error = loop {
        match receiver.recv::<u8>(Duration::from_millis(1)).await {
            Err(TransportError::Deadline { .. }) => {}
            other => break other.unwrap_err(),
        }
    };
    assert_eq!(error, reset);
}

#[tokio::test]
async fn a_send_that_is_given_up_in_the_middle_ends_the_stream() {
    let pair = pair().await;
    let [(mut sender, _back), (_to_client, mut receiver)] = stream(&pair).await;
    let data = Bytes::from(vec![0; 4 << 20]);
    let sending = sender.send_with_data(&1_u8, data);
    assert!(tokio::time::timeout(SHORT, sending).await.is_err());
    drop(sender);
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((1, 4 << 20)));
    let read = receiver.read_data(LONG).await;
    assert!(matches!(
        read.unwrap_err(),
        TransportError::StreamReset { .. }
    ));
}

#[tokio::test]
async fn a_sender_that_waits_for_room_learns_that_its_reader_is_gone() {
    let pair = pair().await;
    let [(mut sender, _back), (_to_client, receiver)] = stream(&pair).await;
    let giving_up = async {
        tokio::time::sleep(SHORT).await;
        drop(receiver);
    };
    let sending = sender.send_with_data(&1_u8, Bytes::from(vec![0; 4 << 20]));
    let (sent, ()) = tokio::join!(tokio::time::timeout(LONG, sending), giving_up);
    let stopped = TransportError::StreamStopped {
        code: StreamCode::CANCELLED,
    };
    assert_eq!(sent.expect("it is woken").unwrap_err(), stopped);
}
