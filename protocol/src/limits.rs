//! Limits that several parts share, with their reasons. The limits of a single part are next to its code;
//! others are in its configuration.

use std::time::Duration;

/// Longest file name in bytes (POSIX `NAME_MAX` of Linux file systems).
pub const NAME_BYTES_MAX: usize = 255;
/// Longest symlink target in bytes (Linux `PATH_MAX` without its terminating NUL).
pub const SYMLINK_BYTES_MAX: usize = 4095;
/// Deepest directory. Bounds the walks that check a rename for cycles, and keeps reachable every path that a
/// program can build step by step with `PATH_MAX`.
pub const DIRECTORY_DEPTH_MAX: usize = 4096;
/// Most hard links to one file (as ext4).
pub const LINKS_MAX: u32 = 65_000;
/// Largest file in bytes: what `off_t` holds, less one block, so that no sum overflows.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64 - BLOCK_BYTES_MAX;
/// Longest extended attribute name in bytes (Linux `XATTR_NAME_MAX`).
pub const XATTR_NAME_BYTES_MAX: usize = 255;
/// Largest extended attribute value in bytes (Linux `XATTR_SIZE_MAX`).
pub const XATTR_VALUE_BYTES_MAX: usize = 65_536;
/// All extended attributes of one inode together, in bytes: what `listxattr` can return.
pub const XATTR_TOTAL_BYTES_MAX: usize = 65_536;

/// Largest block in bytes (the paper's 256 MiB).
pub const BLOCK_BYTES_MAX: u64 = 256 << 20;
/// Smallest configurable block size in bytes; below it, metadata costs more than data.
pub const BLOCK_BYTES_MIN: u64 = 1 << 20;
/// A chunk: the unit of checksums, and of alignment of packets within a block. One page, so that
/// a random read of a page verifies exactly what it returns.
pub const CHUNK_BYTES: usize = 4096;
/// Most data in one packet of a block stream. 1 MiB amortises the per-packet cost (section 6 of
/// the design) and bounds what a datanode buffers for one stream.
pub const PACKET_BYTES_MAX: usize = 1 << 20;
/// Most replicas of one block.
pub const REPLICATION_MAX: u8 = 10;

/// Most extents in one commit; a larger one is split by the client.
pub const EXTENTS_PER_COMMIT_MAX: usize = 8_192;
/// Most pieces of a file that one clone shares: the namenode answers no other request during a clone, for some
/// milliseconds. A larger one is split by the client.
pub const PIECES_PER_CLONE_MAX: usize = 65_536;
/// Most pieces that a file may receive through clones, since copies of copies double them with each request:
/// with the smallest blocks, this many pieces are a file of 2 TiB.
pub const PIECES_OF_CLONES_MAX: usize = 2 << 20;
/// Most files in one commit.
pub const FILES_PER_COMMIT_MAX: usize = 1_024;
/// Most extents in one reply; the client asks for the rest by offset.
pub const EXTENTS_PER_REPLY_MAX: usize = 8_192;
/// Inodes that one search for sparse blocks examines: some milliseconds of the namenode's time.
pub const INODES_PER_SEARCH_MAX: usize = 16_384;
/// Most pieces of files in one request to relocate them.
pub const RELOCATIONS_PER_REQUEST_MAX: usize = 1_024;
/// Most inodes that one command removes from the trash: a fraction of a millisecond of work.
pub const TRASH_INODES_PER_COMMAND_MAX: usize = 1_024;
/// Most files or names that the namenode checks for due upkeep in one tick: a fraction of a millisecond of
/// work.
pub const UPKEEP_INODES_PER_TICK_MAX: usize = 1_024;
/// Most names, inodes and extents in a snapshot of a directory: the namenode answers no request while it copies
/// them, for a fraction of a second.
pub const SNAPSHOT_ITEMS_MAX: u64 = 524_288;
/// Most directory entries in one reply.
pub const ENTRIES_PER_REPLY_MAX: usize = 1_024;
/// Most blocks in one allocation, location or seal request.
pub const BLOCKS_PER_REQUEST_MAX: usize = 1_024;
/// Most quarantined blocks that one reply lists.
pub const QUARANTINED_PER_REPLY_MAX: usize = 256;
/// Most schedulers whose controllers may report.
pub const HARVEST_SCHEDULERS_MAX: usize = 16;
/// Most classes in a controller's report: the paper has 23.
pub const HARVEST_CLASSES_MAX: usize = 256;
/// Most jobs in a controller's report.
pub const HARVEST_JOBS_MAX: usize = 256;
/// Most places of all jobs in such a report.
pub const HARVEST_PLACES_MAX: usize = 4_096;
/// Longest name in such a report in bytes.
pub const HARVEST_NAME_BYTES_MAX: usize = 256;
/// Most replicas in one part of a block report: a part stays below a frame's header limit.
pub const REPLICAS_PER_REPORT_MAX: usize = 16_384;
/// Most pieces of history in one import request: with the longest names they stay below a frame's header limit,
/// together with [`HISTORY_SAMPLES_PER_REQUEST_MAX`].
pub const HISTORY_RECORDS_PER_REQUEST_MAX: usize = 1_024;
/// Most utilisation samples in one import request: a month of seven tenants sampled every five minutes, or of
/// one tenant sampled every minute.
pub const HISTORY_SAMPLES_PER_REQUEST_MAX: usize = 65_536;
/// Most blocks that one report on placement explains, and most that it lists as lost.
pub const BLOCKS_PER_REPORT_MAX: usize = 1_024;
/// Most tenants in one reply.
pub const TENANTS_PER_REPLY_MAX: usize = 1_024;
/// Most bytes of a snapshot of the namespace in one message: a frame's header has room for them and for their
/// description.
pub const SNAPSHOT_PART_BYTES_MAX: usize = 512 << 10;
/// A namenode adds no further records to a message for another namenode once they have this many bytes: the
/// last record may be as large as a change can be, and all still fit into a frame's header.
pub const APPENDED_BYTES_MAX: usize = 256 << 10;
/// Most commands that one heartbeat's reply carries; the rest waits for the next.
pub const COMMANDS_PER_HEARTBEAT_MAX: usize = 256;
/// Most namenodes that a client or a datanode learns of; a group has five, and one more for each that is being
/// replaced.
pub const NAMENODES_TOLD_MAX: usize = 16;
/// Most supplementary groups of a caller (Linux `NGROUPS_MAX` is 65536; NFS carries 16; no user has more than
/// this in practice, and it bounds a request).
pub const GROUPS_MAX: usize = 1_024;
/// Most volumes of one datanode.
pub const VOLUMES_PER_NODE_MAX: usize = 64;
/// Longest name of a server, rack, environment or machine function in bytes.
pub const LABEL_BYTES_MAX: usize = 128;
/// Replies to a session's most recent mutations that the namenode remembers, so that a repeated request is
/// answered without being executed again. Also the most mutations that a session may have in flight.
pub const MUTATIONS_IN_FLIGHT_MAX: usize = 1_024;
/// Most delegations that one session may have, see [`crate::meta::MetaReply::Created`].
pub const DELEGATIONS_PER_SESSION_MAX: usize = 16_384;
/// Most simultaneous sessions; bounds the memory that clients can claim.
pub const SESSIONS_MAX: usize = 65_536;
/// Most simultaneous sessions of one client's certificate, a small part of [`SESSIONS_MAX`]: one for each
/// mount, and one for each command while it runs, or for a minute after it was killed.
pub const SESSIONS_PER_CLIENT_MAX: usize = 2_048;
/// Most simultaneous connections from one address to the namenode, and to each datanode, which serves four
/// times as many: one for each mount on a machine, and one for each command while it runs.
pub const CONNECTIONS_PER_ADDRESS_MAX: u32 = 1_024;
/// Most blocks that one session writes simultaneously, for each of which datanodes reserve space: two for each
/// file that is written in bulk, and some in advance.
pub const BLOCKS_PER_SESSION_MAX: usize = 4_096;
/// Most simultaneous block streams of one peer at one datanode, idle ones included: as many as one connection
/// may have, and a quarter of what a datanode serves.
pub const STREAMS_PER_PEER_MAX: u32 = 1_024;

/// A session that was silent for this long has lost its leases.
pub const LEASE: Duration = Duration::from_secs(10);
/// How long a session believes what it has cached after it sent something that was answered: one hundredth less
/// than [`LEASE`], since its clock may be slower than the namenode's. Kernels correct the rate of a clock by
/// 0.05 % at most.
pub const LEASE_BELIEVED: Duration = Duration::from_millis(9_900);
/// A session that was silent for this long is ended: its uncommitted blocks are collected.
pub const SESSION_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a session sends a keepalive. Three may be lost before its leases end.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(2_500);
/// How often a datanode sends a heartbeat (as HDFS).
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
/// How long the report of a controller beside a scheduler is valid.
pub const HARVEST_REPORT_EXPIRES: Duration = Duration::from_secs(30);
/// Longest maintenance of a server. During it, the server's blocks have one replica less.
pub const MAINTENANCE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long a block token is valid. Long enough for hours of reading without renewal, short enough to bound the
/// value of a stolen token.
pub const TOKEN_LIFETIME: Duration = Duration::from_secs(6 * 3600);
