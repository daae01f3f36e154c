use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use bytes::Bytes;

use super::*;
use crate::codec::{StreamKind, WireError};
use crate::transport::local::{Door, LinkSlot, OFFER_BYTES, Offer};
use crate::transport::{CloseCode, StreamCode, TransportError};

fn caller(offer: &Offer) -> UnixStream {
    let address = SocketAddr::from_abstract_name(offer.socket_name()).unwrap();
    let socket = UnixStream::connect_addr(&address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Whether the other side hangs up without a word.
fn is_turned_away(mut socket: UnixStream) -> bool {
    !matches!(socket.read(&mut [0; 1]), Ok(1..))
}

#[tokio::test]
async fn a_peer_on_this_host_gets_a_link_and_a_peer_elsewhere_does_not() {
    assert!(pair().await.client.link().is_some());
    let pair = network_pair().await;
    assert!(pair.client.link().is_none() && pair.server.link().is_none());
}

#[tokio::test]
async fn either_side_opens_streams_past_the_network_and_other_ones_are_accepted_as_well() {
    let pair = pair().await;
    let (mut sender, _back) = pair.client.open_stream(StreamKind::Data).await.unwrap();
    sender.send(&1_u8).await.unwrap();
    let (kind, _back, mut receiver) = pair.server.accept_stream().await.unwrap();
    assert_eq!(kind, StreamKind::Data);
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((1, 0)));

    assert!(pair.server.link().is_some());
    let (mut sender, _back) = pair.server.open_stream(StreamKind::Rpc).await.unwrap();
    sender.send(&2_u8).await.unwrap();
    let (kind, _back, mut receiver) = pair.client.accept_stream().await.unwrap();
    assert_eq!(kind, StreamKind::Rpc);
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((2, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_is_good_for_one_link_and_nothing_else_is() {
    let door = Door::open().unwrap();
    let slot = LinkSlot::default();
    let offer = door.offer(&slot);

    let mut stranger = caller(&offer);
    stranger.write_all(&[7; OFFER_BYTES]).unwrap();
    assert!(is_turned_away(stranger));
    let silent = caller(&offer);
    assert!(is_turned_away(silent), "after its time");
    assert!(slot.get().is_none());

    let link = offer.take().await.unwrap();
    link.open(StreamKind::Data).unwrap();
    let at_door = tokio::time::timeout(LONG, slot.wait()).await.unwrap();
    let (kind, _stream) = at_door.accept().await.unwrap().unwrap();
    assert_eq!(kind, StreamKind::Data);
    assert!(offer.take().await.is_err(), "it was used");

    let forgotten = door.offer(&LinkSlot::default());
    assert!(forgotten.take().await.is_err(), "its connection is gone");
    let closed = door.offer(&slot);
    drop(door);
    // The task behind the door ends at its next step.
    tokio::time::sleep(SHORT).await;
    assert!(closed.take().await.is_err());
}

#[tokio::test]
async fn who_does_not_know_the_proof_gets_no_stream() {
    let door = Door::open().unwrap();
    let slot = LinkSlot::default();
    let mut encoded = door.offer(&slot).encode();
    encoded[OFFER_BYTES - 1] ^= 1;
    let error = Offer::decode(&encoded).unwrap().take().await.unwrap_err();
    assert!(error.to_string().contains("somebody else"), "{error}");
}

#[test]
fn an_offer_of_another_length_is_malformed() {
    for length in (0..OFFER_BYTES).chain([OFFER_BYTES + 1]) {
        let decoded = Offer::decode(&vec![1; length]).map(drop);
        assert!(matches!(decoded, Err(WireError::Malformed { .. })));
    }
    let bytes: Vec<u8> = (0..OFFER_BYTES as u8).collect();
    assert_eq!(Offer::decode(&bytes).unwrap().encode(), bytes);
}

#[tokio::test]
async fn an_unknown_kind_of_stream_ends_the_connection() {
    let pair = pair().await;
    let link = pair.client.link().unwrap();
    let (_here, there) = UnixStream::pair().unwrap();
    link.send(b'G', &there.into()).unwrap();
    let error = pair.server.accept_stream().await.unwrap_err();
    assert!(matches!(
        error,
        TransportError::Wire(WireError::Malformed { .. })
    ));
    assert!(matches!(
        pair.client.closed().await,
        TransportError::ClosedByPeer {
            code: CloseCode::PROTOCOL_VIOLATION,
            ..
        }
    ));
}

#[tokio::test]
async fn what_is_handed_over_instead_of_a_stream_is_passed_over() {
    let pair = pair().await;
    let link = pair.client.link().unwrap();
    let file = tempfile::tempfile().unwrap();
    link.send(StreamKind::Data.encode(), &file.into()).unwrap();
    let (mut sender, _back) = pair.client.open_stream(StreamKind::Rpc).await.unwrap();
    sender.send(&3_u8).await.unwrap();
    let (kind, _back, mut receiver) = pair.server.accept_stream().await.unwrap();
    assert_eq!(kind, StreamKind::Rpc);
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((3, 0)));
}

#[tokio::test]
async fn streams_end_with_their_connection() {
    let pair = pair().await;
    let (mut sender, mut receiver) = pair.client.open_stream(StreamKind::Data).await.unwrap();
    let (_, _kept_sender, _kept_receiver) = pair.server.accept_stream().await.unwrap();
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
    // Nobody reads, and nobody will.
    let error = loop {
        let data = Bytes::from(vec![0; 1 << 20]);
        if let Err(error) = sender.send_with_data(&(), data).await {
            break error;
        }
    };
    assert_eq!(error, enough);
}

#[tokio::test]
async fn a_stream_given_up_before_its_first_word_is_reset() {
    let pair = pair().await;
    drop(pair.client.open_stream(StreamKind::Data).await.unwrap());
    let (_, _sender, mut receiver) = pair.server.accept_stream().await.unwrap();
    let reset = TransportError::StreamReset {
        code: StreamCode::FAILED,
    };
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap_err(), reset);
}
