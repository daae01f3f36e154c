use bytes::Bytes;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::codec::{MAX_DATA_BYTES, MAX_HEADER_BYTES, StreamKind, WireError};
use crate::transport::{FrameReceiver, FrameSender, StreamCode, TransportError};

/// A data stream: the sender of the client, and the receiver of the server.
async fn data_stream(pair: &Pair) -> (FrameSender, FrameReceiver, FrameSender, FrameReceiver) {
    let (mut client_sender, client_receiver) =
        pair.client.open_stream(StreamKind::Data).await.unwrap();
    assert_eq!(client_sender.is_local(), pair.client.opens_local_streams());
    client_sender.announce().await.unwrap();
    let (kind, server_sender, server_receiver) = pair.server.accept_stream().await.unwrap();
    assert_eq!(kind, StreamKind::Data);
    (
        client_sender,
        client_receiver,
        server_sender,
        server_receiver,
    )
}

fn random_bytes(len: usize, seed: u64) -> Bytes {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes.into()
}

async fn data_of_all_sizes_arrives_as_sent_however_it_is_read(pair: Pair) {
    let sizes = [
        0,
        1,
        4095,
        4096,
        65_537,
        1 << 20,
        3_000_001,
        MAX_DATA_BYTES - 1,
        MAX_DATA_BYTES,
    ];
    let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
    let send = async {
        for (index, size) in (0_u64..).zip(sizes) {
            let data = random_bytes(size, index);
            // Once for each way of reading, and once to be skipped.
            for way in 0..4_u8 {
                sender
                    .send_with_data(&(index, way), data.clone())
                    .await
                    .unwrap();
            }
            let middle = size / 2;
            let mut parts = [data.slice(..middle), Bytes::new(), data.slice(middle..)];
            let head = (index, 0_u8);
            sender.send_parts(&head, &mut parts).await.unwrap();
        }
        sender.finish().unwrap();
    };
    let receive = async {
        let mut frames = 0;
        while let Some(((index, way), len)) = receiver.recv::<(u64, u8)>(LONG).await.unwrap() {
            frames += 1;
            let expected = random_bytes(sizes[index as usize], index);
            assert_eq!(len, expected.len());
            let data = match way {
                0 => receiver.read_data(LONG).await.unwrap(),
                1 => {
                    let mut buffer = vec![0; len];
                    let (first, second) = buffer.split_at_mut(len / 3);
                    receiver.read_data_into(first, LONG).await.unwrap();
                    receiver.read_data_into(second, LONG).await.unwrap();
                    buffer.into()
                }
                2 => {
                    let mut all = Vec::new();
                    while let Some(piece) = receiver.read_data_chunk(5000, LONG).await.unwrap() {
                        assert!(piece.len() <= 5000);
                        all.extend_from_slice(&piece);
                    }
                    all.into()
                }
                _ => continue,
            };
            assert!(data == expected, "frame {index}, way {way}");
            assert_eq!(receiver.data_remaining(), 0);
        }
        assert_eq!(frames, sizes.len() * 5);
    };
    tokio::join!(send, receive);
}

async fn both_directions_work_at_once(pair: Pair) {
    let (mut to_server, mut from_server, mut to_client, mut from_client) = data_stream(&pair).await;
    let data = random_bytes(2 << 20, 1);
    let (first, second, there, back) = tokio::join!(
        to_server.send_with_data(&1_u32, data.clone()),
        to_client.send_with_data(&2_u32, data.clone()),
        async {
            from_client.recv::<u32>(LONG).await.unwrap();
            from_client.read_data(LONG).await.unwrap()
        },
        async {
            from_server.recv::<u32>(LONG).await.unwrap();
            from_server.read_data(LONG).await.unwrap()
        }
    );
    first.unwrap();
    second.unwrap();
    assert!(there == data && back == data);
}

async fn a_cancelled_receive_loses_nothing(pair: Pair) {
    let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
    let waited = receiver.recv::<String>(Duration::from_millis(5)).await;
    assert!(matches!(
        waited.unwrap_err(),
        TransportError::Deadline { .. }
    ));
    let text = "x".repeat(500_000);
    let (sent, received) = tokio::join!(sender.send(&text), async {
        loop {
            // Given up again and again in the middle of the frame.
            tokio::select! {
                biased;
                message = receiver.recv::<String>(LONG) => break message,
                () = tokio::task::yield_now() => {}
            }
        }
    });
    sent.unwrap();
    let (message, data_len) = received.unwrap().unwrap();
    assert!(message == text && data_len == 0);
}

async fn reading_past_the_data_is_an_error(pair: Pair) {
    let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
    sender
        .send_with_data(&(), Bytes::from_static(b"abc"))
        .await
        .unwrap();
    receiver.recv::<()>(LONG).await.unwrap();
    let error = receiver
        .read_data_into(&mut [0; 4], LONG)
        .await
        .unwrap_err();
    assert_eq!(error, WireError::Truncated { missing_bytes: 1 }.into());
    assert_eq!(receiver.read_data(LONG).await.unwrap(), "abc");
}

async fn what_is_too_large_is_not_sent_and_the_stream_goes_on(pair: Pair) {
    let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
    let too_large = [
        sender.send(&"x".repeat(MAX_HEADER_BYTES)).await,
        sender
            .send_with_data(&(), vec![0; MAX_DATA_BYTES + 1].into())
            .await,
    ];
    for result in too_large {
        assert!(matches!(
            result.unwrap_err(),
            TransportError::Wire(WireError::TooLarge { .. })
        ));
    }
    sender.send(&7_u8).await.unwrap();
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((7, 0)));
}

async fn oversized_malformed_and_truncated_frames_are_typed_errors(pair: Pair) {
    let oversized = [u32::MAX.to_le_bytes(), [0; 4]].concat();
    let malformed = vec![1, 0, 0, 0, 0, 0, 0, 0, 9];
    let cut_header = vec![5, 0, 0, 0, 0, 0, 0, 0, 1];
    let cut_prefix = vec![5, 0];
    for (bytes, expected) in [
        (oversized, "over the limit"),
        (malformed, "malformed"),
        (cut_header, "truncated: 4 bytes"),
        (cut_prefix, "truncated: 6 bytes"),
    ] {
        let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
        sender.write(bytes.into(), &mut []).await.unwrap();
        sender.finish().unwrap();
        let error = receiver.recv::<bool>(LONG).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
    let data_cut = [&[1, 0, 0, 0, 9, 0, 0, 0, 1][..], b"half"].concat();
    sender.write(data_cut.into(), &mut []).await.unwrap();
    sender.finish().unwrap();
    assert_eq!(receiver.recv::<bool>(LONG).await.unwrap(), Some((true, 9)));
    let error = receiver.read_data(LONG).await.unwrap_err();
    assert_eq!(error, WireError::Truncated { missing_bytes: 5 }.into());
}

async fn random_bytes_never_panic(pair: Pair) {
    for seed in 0..50 {
        let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
        let mut bytes = random_bytes(200, seed).to_vec();
        // Small lengths, so that some of it gets past the limits.
        bytes[1..4].fill(0);
        bytes[5..8].fill(0);
        sender.write(bytes.into(), &mut []).await.unwrap();
        sender.finish().unwrap();
        while let Ok(Some(_)) = receiver.recv::<(u8, String)>(LONG).await {}
    }
    assert!(!pair.client.is_closed());
}

#[tokio::test]
async fn resetting_and_stopping_tell_the_peer_the_code() {
    let pair = network_pair().await;
    let (mut to_server, _back, _to_client, mut from_client) = data_stream(&pair).await;
    to_server.reset(StreamCode(41));
    assert_eq!(
        from_client.recv::<u8>(LONG).await.unwrap_err(),
        TransportError::StreamReset {
            code: StreamCode(41)
        }
    );
    assert_eq!(
        to_server.send(&1).await.unwrap_err(),
        TransportError::StreamUnusable
    );

    let (mut to_server, _back, _to_client, from_client) = data_stream(&pair).await;
    drop(from_client);
    let error = loop {
        if let Err(error) = to_server.send(&1).await {
            break error;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(
        error,
        TransportError::StreamStopped {
            code: StreamCode::CANCELLED
        }
    );
}

async fn a_sender_that_is_dropped_early_is_not_taken_for_the_end(pair: Pair) {
    let (mut sender, _back, _to_client, mut receiver) = data_stream(&pair).await;
    sender.send(&1_u8).await.unwrap();
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((1, 0)));
    drop(sender);
    assert!(matches!(
        receiver.recv::<u8>(LONG).await.unwrap_err(),
        TransportError::StreamReset { .. }
    ));
}

async fn a_peer_that_does_not_read_stops_the_sender_at_its_deadline(pair: Pair) {
    let (mut sender, _back, _to_client, _receiver) = data_stream(&pair).await;
    sender.set_deadline(SHORT);
    let data = random_bytes(MAX_DATA_BYTES, 0);
    let mut sent_bytes = 0;
    let error = loop {
        match sender.send_with_data(&(), data.clone()).await {
            Ok(()) => sent_bytes += data.len(),
            Err(error) => break error,
        }
        assert!(sent_bytes <= 64 << 20, "no backpressure");
    };
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    assert_eq!(
        sender.send(&()).await.unwrap_err(),
        TransportError::StreamUnusable
    );
}

async fn a_send_that_is_cancelled_in_the_middle_makes_the_sender_unusable(pair: Pair) {
    let (mut sender, _back, _to_client, _receiver) = data_stream(&pair).await;
    let data = random_bytes(MAX_DATA_BYTES, 0);
    let cancelled = tokio::time::timeout(SHORT, async {
        // More than all windows take, and the receiver does not read.
        loop {
            sender.send_with_data(&(), data.clone()).await.unwrap();
        }
    })
    .await;
    assert!(cancelled.is_err());
    assert_eq!(
        sender.send(&()).await.unwrap_err(),
        TransportError::StreamUnusable
    );
}

#[tokio::test]
async fn a_stream_given_up_before_its_first_word_is_skipped() {
    let pair = network_pair().await;
    drop(pair.client.open_stream(StreamKind::Data).await.unwrap());
    let (mut sender, _back) = pair.client.open_stream(StreamKind::Rpc).await.unwrap();
    sender.send(&9_u8).await.unwrap();
    let (kind, _sender, mut receiver) = pair.server.accept_stream().await.unwrap();
    assert_eq!(kind, StreamKind::Rpc);
    assert_eq!(receiver.recv::<u8>(LONG).await.unwrap(), Some((9, 0)));
}

#[tokio::test]
async fn a_stream_of_an_unknown_kind_ends_the_connection() {
    let pair = network_pair().await;
    let (mut sender, _back) = pair.client.open_stream(StreamKind::Data).await.unwrap();
    sender
        .write(Bytes::from_static(b"GET /"), &mut [])
        .await
        .unwrap();
    let error = pair.server.accept_stream().await.unwrap_err();
    assert!(matches!(
        error,
        TransportError::Wire(WireError::Malformed { .. })
    ));
    assert!(matches!(
        pair.client.closed().await,
        TransportError::ClosedByPeer { .. }
    ));
}

both_ways! {
    data_of_all_sizes_arrives_as_sent_however_it_is_read,
    both_directions_work_at_once,
    a_cancelled_receive_loses_nothing,
    reading_past_the_data_is_an_error,
    what_is_too_large_is_not_sent_and_the_stream_goes_on,
    oversized_malformed_and_truncated_frames_are_typed_errors,
    random_bytes_never_panic,
    a_sender_that_is_dropped_early_is_not_taken_for_the_end,
    a_peer_that_does_not_read_stops_the_sender_at_its_deadline,
    a_send_that_is_cancelled_in_the_middle_makes_the_sender_unusable,
}
