//! One datanode of a pipeline: packets arrive from upstream, go to the disk and downstream at the same time, and are
//! acknowledged upstream once both are done.

mod progress;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::data::{DataRequest, Opening, Packet, WriteAck, WriteRequest};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::limits::REPLICATION_MAX;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::transport::{FrameReceiver, FrameSender, TransportError};
use tokio::sync::mpsc;

use self::progress::Progress;
use crate::driver::node::{Node, Registration};
use crate::engine::write::packet::Packets;
use crate::engine::write::progress::{Failure, Step};
use crate::store::{BlockWriter, Origin, WritePacket};

/// Most bytes of packets in flight through this datanode: enough to keep disk and network busy at the same time.
const WINDOW_BYTES: usize = 4 << 20;
/// Most packets in flight through this datanode, however small.
const WINDOW_PACKETS: usize = 256;
/// Most data written by a single disk job, so that acknowledgements keep flowing.
const BATCH_BYTES: usize = 2 << 20;
/// A writer that neither writes nor ends its stream for this long is given up.
const IDLE_DEADLINE: Duration = Duration::from_secs(3600);
/// How long the data of a packet may take to arrive after its header.
const DATA_DEADLINE: Duration = Duration::from_secs(30);
/// How long the rest of the pipeline may take to become ready.
const READY_DEADLINE: Duration = Duration::from_secs(30);

/// The next datanode of the pipeline.
struct Downstream {
    node: NodeId,
    sender: FrameSender,
    receiver: FrameReceiver,
}

/// Work for this datanode's disk.
enum DiskWork {
    Write(WritePacket),
    Sync,
    Seal { length_bytes: u64 },
}

/// A packet for the next datanode.
type Forward = (Packet, Bytes);

/// Serves a write stream until its end or failure; if there is a `denial`, refuses it.
///
/// A failure names the datanode that failed by the number that the namenode assigned. A datanode that has no number
/// yet ends the stream without a message, and its peer, which knows the number, names it.
///
/// # Errors
/// The error that broke the stream.
pub async fn serve(
    node: Arc<Node>,
    request: WriteRequest,
    denial: Option<DataError>,
    mut sender: FrameSender,
    receiver: FrameReceiver,
) -> Result<(), TransportError> {
    let registration = match denial {
        Some(_) => node.registration(),
        None => node.wait_for_registration().await,
    };
    let Some(registration) = registration else {
        tracing::debug!(block = %request.block, "no writer is served before the registration");
        return sender.finish();
    };
    if let Some(error) = denial {
        let node = registration.id;
        sender.send(&WriteAck::Failed { node, error }).await?;
        return sender.finish();
    }
    let timer = node.metrics.open.timer();
    let opened = open(&node, registration, &request).await;
    drop(timer);
    let (writer, downstream) = match opened {
        Ok(opened) => opened,
        Err(Failure {
            node: failed,
            error,
        }) => {
            node.metrics.open.note_failure(&error);
            let node = failed;
            sender.send(&WriteAck::Failed { node, error }).await?;
            return sender.finish();
        }
    };
    sender.send(&WriteAck::Ready).await?;
    let pipeline = Pipeline {
        id: registration.id,
        block: request.block,
        progress: Progress::new(downstream.is_some()),
        node,
    };
    pipeline.run(writer, downstream, sender, receiver).await
}

/// Creates the replica and connects to the rest of the pipeline, at the same time.
async fn open(
    node: &Node,
    registration: Registration,
    request: &WriteRequest,
) -> Result<(BlockWriter, Option<Downstream>), Failure> {
    let here = |error| Failure {
        node: registration.id,
        error,
    };
    node.check_token(&request.token, request.block, Right::Write)
        .map_err(here)?;
    if request.downstream.len() >= usize::from(REPLICATION_MAX) {
        return Err(here(DataError::Protocol("the pipeline is too long".into())));
    }
    let create = node.store.create(
        request.block,
        request.class,
        Origin::Pipeline,
        registration.block_bytes,
    );
    let (writer, downstream) = tokio::join!(create, connect_downstream(node, request));
    match (writer, downstream) {
        (Ok(writer), Ok(downstream)) => Ok((writer, downstream)),
        (Ok(writer), Err(failure)) => {
            // Nothing was or will be written to it; the block may be tried here again.
            if let Err(error) = writer.discard().await {
                tracing::warn!(%error, "cannot remove an empty replica");
            }
            Err(failure)
        }
        (Err(error), _) => Err(here(error.into())),
    }
}

async fn connect_downstream(
    node: &Node,
    request: &WriteRequest,
) -> Result<Option<Downstream>, Failure> {
    let Some((next, rest)) = request.downstream.split_first() else {
        return Ok(None);
    };
    let failed = |reason: String| Failure {
        node: next.node,
        error: DataError::Downstream(reason),
    };
    let (mut sender, mut receiver) = node.open_stream(next).await.map_err(failed)?;
    let forwarded = Opening::from(DataRequest::Write(WriteRequest {
        downstream: rest.to_vec(),
        ..request.clone()
    }));
    sender
        .send(&forwarded)
        .await
        .map_err(|error| failed(error.to_string()))?;
    match receiver.recv::<WriteAck>(READY_DEADLINE).await {
        Ok(Some((WriteAck::Ready, _))) => Ok(Some(Downstream {
            node: next.node,
            sender,
            receiver,
        })),
        Ok(Some((WriteAck::Failed { node, error }, _))) => Err(Failure { node, error }),
        Ok(Some((WriteAck::Acked { .. }, _))) => Err(failed("it acknowledges nothing".into())),
        Ok(None) => Err(failed("it ended the stream".into())),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// An open pipeline, as seen from one of its datanodes.
struct Pipeline {
    node: Arc<Node>,
    /// This datanode's number.
    id: NodeId,
    block: BlockId,
    progress: Progress,
}

impl Pipeline {
    async fn run(
        self,
        writer: BlockWriter,
        downstream: Option<Downstream>,
        sender: FrameSender,
        receiver: FrameReceiver,
    ) -> Result<(), TransportError> {
        let (disk_queue, disk_work) = mpsc::channel(WINDOW_PACKETS);
        let (forward_queue, forwards) = mpsc::channel(WINDOW_PACKETS);
        let (to_downstream, from_downstream) = downstream
            .map(|it| ((it.node, it.sender), (it.node, it.receiver)))
            .unzip();
        let forward_queue = to_downstream.is_some().then_some(forward_queue);
        let work = async {
            tokio::join!(
                self.receive(receiver, disk_queue, forward_queue),
                self.write(writer, disk_work),
                self.forward(to_downstream, forwards),
                self.take_acks(from_downstream),
                self.watch_for_denial(),
            );
        };
        let acknowledging = self.acknowledge(sender);
        tokio::pin!(acknowledging);
        tokio::select! {
            biased;
            sent = &mut acknowledging => sent,
            // The denial that ended the work ends this too, once what was done last is acknowledged.
            () = work => acknowledging.await,
        }
    }

    fn fail(&self, error: DataError) {
        self.progress.fail(self.id, error);
    }

    /// Ends the stream when the datanode stops or its primary tenant needs the server. Packets end at chunk
    /// boundaries, and so does the acknowledged data.
    async fn watch_for_denial(&self) {
        let denial = tokio::select! {
            biased;
            () = self.node.stopping() => DataError::Stopping,
            denial = self.node.busy.denied() => {
                self.node.metrics.denied_writes.inc();
                denial
            }
        };
        self.fail(denial);
    }

    /// Receives packets from upstream and hands them to disk and network.
    async fn receive(
        &self,
        mut receiver: FrameReceiver,
        disk_queue: mpsc::Sender<DiskWork>,
        forward_queue: Option<mpsc::Sender<Forward>>,
    ) {
        let mut packets = Packets::default();
        loop {
            self.progress
                .wait_for_room(WINDOW_BYTES, WINDOW_PACKETS)
                .await;
            let (packet, data_len) = match receiver.recv::<Packet>(IDLE_DEADLINE).await {
                Ok(Some(frame)) => frame,
                Ok(None) => return self.progress.end_input(),
                Err(error) => {
                    tracing::debug!(%error, "the writer is gone");
                    return self.progress.fail_silently();
                }
            };
            if let Err(error) = packets.accept(&packet, data_len) {
                return self.fail(error);
            }
            let taken = self.take_data(&mut receiver, data_len).await;
            let data = match taken {
                Ok(data) => data,
                Err(error) => {
                    tracing::debug!(%error, "the writer is gone");
                    return self.progress.fail_silently();
                }
            };
            self.progress.received(data_len);
            log_packet(self.block, &packet, data_len);
            if let Some(queue) = &forward_queue {
                // The queue holds a whole window; if it is closed, the pipeline has failed, which is recorded
                // elsewhere.
                let _ = queue.send((packet.clone(), data.slice(..data_len))).await;
            }
            let is_last = matches!(packet, Packet::Seal { .. });
            let _ = disk_queue.send(disk_work(packet, data)).await;
            if is_last {
                return self.progress.end_input();
            }
        }
    }

    /// Receives the data of a packet into a page-aligned buffer, padded with zeros to whole chunks.
    async fn take_data(
        &self,
        receiver: &mut FrameReceiver,
        data_len: usize,
    ) -> Result<Bytes, TransportError> {
        if data_len == 0 {
            return Ok(Bytes::new());
        }
        let holds_none = self.progress.bytes_in_flight() == 0;
        let buffers = self.node.store.buffers();
        let mut buffer = buffers.take(data_len, holds_none).await;
        receiver.read_data_into(&mut buffer, DATA_DEADLINE).await?;
        buffer.pad_to_page();
        Ok(buffer.freeze())
    }

    /// Writes to this datanode's disk; each batch is whatever has arrived in the meantime.
    async fn write(&self, mut writer: BlockWriter, mut work: mpsc::Receiver<DiskWork>) {
        loop {
            let first = tokio::select! {
                biased;
                received = work.recv() => match received {
                    Some(work) => work,
                    None => return,
                },
                () = writer.fenced() => {
                    let reason = "the replica is being sealed or deleted".to_owned();
                    return self.fail(DataError::OutOfOrder(reason));
                }
            };
            let mut batch = Batch::default();
            batch.add(first);
            while batch.bytes < BATCH_BYTES && batch.seal.is_none() {
                match work.try_recv() {
                    Ok(work) => batch.add(work),
                    Err(_) => break,
                }
            }
            let is_work = !batch.writes.is_empty() || batch.sync;
            if is_work && let Err(error) = self.write_batch(&mut writer, &mut batch).await {
                return self.fail(error);
            }
            let Some(length_bytes) = batch.seal else {
                self.progress.local_done(batch.packets);
                continue;
            };
            return match writer.seal(length_bytes).await {
                Ok(()) => self.progress.local_done(batch.packets),
                Err(error) => self.fail(error.into()),
            };
        }
    }

    async fn write_batch(
        &self,
        writer: &mut BlockWriter,
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let metrics = &self.node.metrics;
        let _timer = metrics.write.timer();
        let writes = std::mem::take(&mut batch.writes);
        match writer.write(writes, batch.sync).await {
            Ok(()) => {
                metrics.written_by_clients.inc_by(batch.bytes as u64);
                Ok(())
            }
            Err(error) => {
                let error = DataError::from(error);
                metrics.write.note_failure(&error);
                Err(error)
            }
        }
    }

    /// Sends packets on to the next datanode.
    async fn forward(
        &self,
        downstream: Option<(NodeId, FrameSender)>,
        mut forwards: mpsc::Receiver<Forward>,
    ) {
        let Some((node, mut sender)) = downstream else {
            return;
        };
        while let Some((packet, data)) = forwards.recv().await {
            if let Err(error) = sender.send_with_data(&packet, data).await {
                // The datanode's own error message, if there is one, may still be in flight.
                self.progress.fail_later(node, error.to_string()).await;
                return;
            }
        }
        // Upstream has ended its stream. Fails only if this stream has already ended.
        let _ = sender.finish();
    }

    /// Receives the next datanode's acknowledgements.
    async fn take_acks(&self, downstream: Option<(NodeId, FrameReceiver)>) {
        let Some((node, mut receiver)) = downstream else {
            return;
        };
        loop {
            let reason = match receiver.recv::<WriteAck>(IDLE_DEADLINE).await {
                Ok(Some((WriteAck::Acked { packets }, _))) => {
                    if self.progress.downstream_done(packets) {
                        continue;
                    }
                    "it acknowledges what it was not sent".to_owned()
                }
                Ok(Some((WriteAck::Failed { node, error }, _))) => {
                    return self.progress.fail(node, error);
                }
                Ok(Some((WriteAck::Ready, _))) => "it is ready twice".to_owned(),
                Ok(None) if self.progress.downstream_is_complete() => return,
                Ok(None) => "it ended the stream".to_owned(),
                Err(error) => error.to_string(),
            };
            return self.progress.fail(node, DataError::Downstream(reason));
        }
    }

    /// Acknowledges packets to upstream, until all are done or something failed.
    async fn acknowledge(&self, mut sender: FrameSender) -> Result<(), TransportError> {
        let mut acknowledged = 0;
        loop {
            let step = self.progress.next_step(acknowledged).await;
            match step {
                Step::Acknowledge(packets) => {
                    sender.send(&WriteAck::Acked { packets }).await?;
                    acknowledged = packets;
                    self.progress.acknowledged(packets);
                }
                Step::Complete => return sender.finish(),
                Step::Fail(Failure { node, error }) => {
                    sender.send(&WriteAck::Failed { node, error }).await?;
                    return sender.finish();
                }
                Step::GiveUp => return Ok(()),
            }
        }
    }
}

/// Packets that are written by one disk job.
#[derive(Default)]
struct Batch {
    writes: Vec<WritePacket>,
    sync: bool,
    seal: Option<u64>,
    bytes: usize,
    packets: u64,
}

impl Batch {
    fn add(&mut self, work: DiskWork) {
        self.packets += 1;
        match work {
            DiskWork::Write(packet) => {
                self.bytes += packet.data.len();
                self.sync |= packet.sync;
                self.writes.push(packet);
            }
            DiskWork::Sync => self.sync = true,
            DiskWork::Seal { length_bytes } => self.seal = Some(length_bytes),
        }
    }
}

fn log_packet(block: BlockId, packet: &Packet, data_len: usize) {
    if let Packet::Data {
        block_offset,
        request,
        ..
    } = packet
    {
        request.during(|| tracing::debug!(%block, block_offset, bytes = data_len, "data has come"));
    }
}

fn disk_work(packet: Packet, data: Bytes) -> DiskWork {
    match packet {
        Packet::Data {
            block_offset,
            checksums,
            sync,
            ..
        } => DiskWork::Write(WritePacket {
            block_offset,
            data,
            checksums,
            sync,
        }),
        Packet::Sync => DiskWork::Sync,
        Packet::Seal { length_bytes } => DiskWork::Seal { length_bytes },
    }
}
