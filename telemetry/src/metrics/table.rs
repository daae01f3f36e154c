//! The table of metrics. There are no others.

use super::{Kind, Metric, Part, Stability};

/// Names each metric twice, for the compiler and for Prometheus, and collects all in [`TABLE`].
macro_rules! table {
    ($($constant:ident = $part:ident $kind:ident $unit:literal $name:literal [$($label:literal),*]
        $stability:ident: $meaning:literal;)*) => {
        $(
            #[doc = $meaning]
            pub const $constant: Metric = Metric {
                name: $name,
                part: Part::$part,
                kind: Kind::$kind,
                unit: $unit,
                labels: &[$($label),*],
                stability: Stability::$stability,
                meaning: $meaning,
            };
        )*
        /// All metrics, by part.
        pub const TABLE: &[Metric] = &[$($constant),*];
    };
}

table! {
    BUILD_INFO = Every Gauge "1" "harvestfs_build_info" ["part", "version"]
        Stable: "Always 1; which part and release this is.";
    START_TIME_SECONDS = Every Gauge "s" "harvestfs_start_time_seconds" []
        Stable: "When the process started, in seconds since 1970.";

    NAMENODE_OPERATION_SECONDS = Namenode Latency "s" "harvestfs_namenode_operation_seconds" ["operation"]
        Stable: "From when a request is taken in hand to its reply; waiting for the journal and for the caches of other clients is part of it.";
    NAMENODE_REFUSALS_TOTAL = Namenode WholeCounter "requests" "harvestfs_namenode_refusals_total" ["operation"]
        Stable: "Requests that were answered with an error, a name that does not exist included.";
    NAMENODE_JOURNAL_SECONDS = Namenode Latency "s" "harvestfs_namenode_journal_seconds" []
        Stable: "From when records are handed to the journal until they are on stable storage, for records that somebody waits for.";
    NAMENODE_JOURNAL_BYTES_TOTAL = Namenode WholeCounter "bytes" "harvestfs_namenode_journal_bytes_total" []
        Stable: "Bytes of records written to the journal.";
    NAMENODE_JOURNAL_RECORD = Namenode Gauge "records" "harvestfs_namenode_journal_record" []
        Internal: "Number of the last record of the journal.";
    NAMENODE_READY = Namenode Gauge "1" "harvestfs_namenode_ready" []
        Stable: "1 once the locations of blocks are known after a start, 0 before.";
    NAMENODE_RECOVERING = Namenode Gauge "1" "harvestfs_namenode_recovering" []
        Stable: "1 while the namenode is in recovery, since datanodes know more than it does, and changes nothing; 0 else.";
    NAMENODE_REFUSED_DATANODES = Namenode Gauge "datanodes" "harvestfs_namenode_refused_datanodes" []
        Stable: "Datanodes that are refused because they obey another namenode of this cluster, which started later.";
    NAMENODE_QUARANTINED_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_quarantined_blocks" []
        Stable: "Blocks that this namenode never allocated, and whose replicas datanodes keep for a while.";
    NAMENODE_QUARANTINED_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_quarantined_bytes" []
        Stable: "What the replicas of these blocks take.";
    NAMENODE_REPAIR_HELD_SECONDS = Namenode Gauge "s" "harvestfs_namenode_repair_held_seconds" []
        Stable: "How much longer at most repair waits because many datanodes fell silent together; 0 if it does not.";
    NAMENODE_INODES = Namenode Gauge "inodes" "harvestfs_namenode_inodes" ["kind"]
        Stable: "Inodes by kind: file, directory, other.";
    NAMENODE_SESSIONS = Namenode Gauge "sessions" "harvestfs_namenode_sessions" []
        Stable: "Open sessions of clients.";
    NAMENODE_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_blocks" []
        Stable: "Blocks that files use or sessions write.";
    NAMENODE_MISSING_REPLICAS_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_missing_replicas_blocks" ["left"]
        Stable: "Sealed blocks with fewer replicas than wanted, by how many are left: 0, 1, 2, more.";
    NAMENODE_LOST_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_lost_blocks" []
        Stable: "Blocks with data of which no replica is known.";
    NAMENODE_CURTAILED_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_curtailed_blocks" []
        Stable: "Sealed blocks that have less than their files ask for because the cluster does not have the datanodes.";
    NAMENODE_WRITE_REPLICAS = Namenode Gauge "replicas" "harvestfs_namenode_write_replicas" ["number"]
        Stable: "Replicas of a block with the default rules: `wanted`, `possible` with the datanodes of the cluster, `at_once` and `needed` to be written now. Writes wait or are refused while `at_once` is below `needed`, and have fewer replicas for now while it is below `possible`.";
    NAMENODE_WRITABLE_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_writable_bytes" []
        Stable: "What can be written now with the default rules; 0 while writes wait or are refused.";
    NAMENODE_MISPLACED_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_misplaced_blocks" []
        Stable: "Sealed blocks that break a constraint of placement that they were promised.";
    NAMENODE_DIVERSITY_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_diversity_blocks" ["score"]
        Stable: "Sealed blocks by how many of the five constraints of placement hold among their replicas: 0 to 5.";
    NAMENODE_REPAIRS_WAITING = Namenode Gauge "blocks" "harvestfs_namenode_repairs_waiting" ["reason"]
        Stable: "Blocks that wait for repair (reason missing) or for the move of a replica (reason misplaced).";
    NAMENODE_REPAIRS_UNDER_WAY = Namenode Gauge "blocks" "harvestfs_namenode_repairs_under_way" []
        Stable: "Repairs and moves under way.";
    NAMENODE_REPAIR_OLDEST_SECONDS = Namenode Gauge "s" "harvestfs_namenode_repair_oldest_seconds" []
        Stable: "How long the block that has waited longest for repair has; 0 if none does.";
    NAMENODE_REPAIRS_TOTAL = Namenode WholeCounter "repairs" "harvestfs_namenode_repairs_total" ["result"]
        Stable: "Repairs and moves that ended: repaired, moved, failed.";
    NAMENODE_REIMAGES_TOTAL = Namenode WholeCounter "reimages" "harvestfs_namenode_reimages_total" []
        Stable: "Known servers that came back with an empty disk.";
    NAMENODE_DATANODES = Namenode Gauge "datanodes" "harvestfs_namenode_datanodes" ["state"]
        Stable: "Datanodes by state: free, busy (their owner needs the server), maintenance (they may be away), dead.";
    NAMENODE_QUOTA_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_quota_bytes" []
        Stable: "What the owners of live datanodes let us use.";
    NAMENODE_USED_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_used_bytes" []
        Stable: "What is used of it.";
    NAMENODE_SERVER_USE_RATIO = Namenode Gauge "ratio" "harvestfs_namenode_server_use_ratio" ["server"]
        Stable: "How much of its quota the fullest (server fullest) and the emptiest live server (emptiest) use; far apart when balancing finds no place within the constraints, or has no budget.";
    NAMENODE_BALANCE_MOVES_TOTAL = Namenode WholeCounter "moves" "harvestfs_namenode_balance_moves_total" []
        Stable: "Replicas moved because other servers are emptier; harvestfs_namenode_repairs_total counts them too.";
    NAMENODE_TOO_FULL_VOLUMES = Namenode Gauge "volumes" "harvestfs_namenode_too_full_volumes" ["outcome"]
        Stable: "Volumes that are fuller than some server by more than they may be, by what came of looking for a replica to move: begun, budget (of moves is used up), constraints (of placement), no_target, unsettled (its blocks are written or repaired), unavailable (its server is busy or silent).";
    NAMENODE_CELL_CAPACITY_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_cell_capacity_bytes" ["row", "column"]
        Stable: "Space of a cell of the grid; row 0 has the lowest peaks, column 0 the fewest reimages.";
    NAMENODE_CELL_FREE_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_cell_free_bytes" ["row", "column"]
        Stable: "Free space of a cell of the grid.";
    NAMENODE_CELL_SERVERS = Namenode Gauge "servers" "harvestfs_namenode_cell_servers" ["row", "column"]
        Stable: "Servers of a cell of the grid.";
    NAMENODE_ENGINE_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_engine_bytes" []
        Internal: "Memory of the engine's tables, estimated from their capacity.";

    DATANODE_OPERATION_SECONDS = Datanode Latency "s" "harvestfs_datanode_operation_seconds" ["operation"]
        Stable: "read: a range, from request to last byte sent; open: until a pipeline stands; write: a batch of packets, onto the disk; seal; repair: a whole replica fetched; scrub: a piece read and verified.";
    DATANODE_FAILURES_TOTAL = Datanode WholeCounter "operations" "harvestfs_datanode_failures_total" ["operation"]
        Stable: "Operations that failed, denials left out.";
    DATANODE_BYTES_TOTAL = Datanode WholeCounter "bytes" "harvestfs_datanode_bytes_total" ["direction", "purpose"]
        Stable: "Bytes of blocks by direction (read, written) and purpose: client, repair, scrub.";
    DATANODE_DENIALS_TOTAL = Datanode WholeCounter "denials" "harvestfs_datanode_denials_total" ["operation"]
        Stable: "Reads, writes and repairs that were denied or broken off because the owner needs the server.";
    DATANODE_BUSY = Datanode Gauge "1" "harvestfs_datanode_busy" []
        Stable: "1 while the server is left to its owner.";
    DATANODE_BUSY_SECONDS_TOTAL = Datanode Counter "s" "harvestfs_datanode_busy_seconds_total" []
        Stable: "How long the server has been left to its owner since the start.";
    DATANODE_PRIMARY_CPU_RATIO = Datanode Gauge "ratio" "harvestfs_datanode_primary_cpu_ratio" []
        Stable: "What the primary tenant uses of all cores; NaN when that is not known.";
    DATANODE_PRIMARY_MEMORY_RATIO = Datanode Gauge "ratio" "harvestfs_datanode_primary_memory_ratio" []
        Stable: "What the primary tenant uses of the memory; NaN when that is not known.";
    DATANODE_PRIMARY_STALLED_RATIO = Datanode Gauge "ratio" "harvestfs_datanode_primary_stalled_ratio" []
        Stable: "Time in which some task of the server waited for CPU, memory or a disk, the worst of the three: the owner's slowdown, as far as the kernel measures it; NaN when it does not.";
    DATANODE_STREAMS = Datanode Gauge "streams" "harvestfs_datanode_streams" []
        Stable: "Block streams under way.";
    DATANODE_REGISTERED = Datanode Gauge "1" "harvestfs_datanode_registered" []
        Stable: "1 once the namenode knows this datanode.";
    DATANODE_VOLUME_QUOTA_BYTES = Datanode Gauge "bytes" "harvestfs_datanode_volume_quota_bytes" ["storage"]
        Stable: "What the owner lets us use of a volume.";
    DATANODE_VOLUME_USED_BYTES = Datanode Gauge "bytes" "harvestfs_datanode_volume_used_bytes" ["storage"]
        Stable: "What is used of it, reservations included.";
    DATANODE_VOLUME_HEALTHY = Datanode Gauge "1" "harvestfs_datanode_volume_healthy" ["storage"]
        Stable: "1 if the volume can be used.";

    MOUNT_OPERATION_SECONDS = Mount Latency "s" "harvestfs_mount_operation_seconds" ["operation"]
        Stable: "From when a request of the kernel is taken in hand to its answer, by the kernel's name for it. What the kernel answers from its own caches is not among them.";
    MOUNT_BYTES_TOTAL = Mount WholeCounter "bytes" "harvestfs_mount_bytes_total" ["direction"]
        Stable: "Bytes of files that the kernel was given (direction read) or handed over (written).";
    MOUNT_FETCHED_BYTES_TOTAL = Mount WholeCounter "bytes" "harvestfs_mount_fetched_bytes_total" ["way"]
        Stable: "Bytes of blocks, in whole chunks, that were read from datanodes: over the network (way network), or from a file that a datanode on this host lent (short_circuit). What came from memory is not among them.";
    MOUNT_DIRTY_BYTES = Mount Gauge "bytes" "harvestfs_mount_dirty_bytes" []
        Stable: "Written data in memory that is not yet committed.";
    MOUNT_DENIALS_TOTAL = Mount WholeCounter "denials" "harvestfs_mount_denials_total" []
        Stable: "Answers of datanodes that their owner needs the server.";
    MOUNT_HEDGED_READS_TOTAL = Mount WholeCounter "reads" "harvestfs_mount_hedged_reads_total" []
        Stable: "Reads for which a second replica was asked because the first was slow.";
    MOUNT_CONNECTED = Mount Gauge "1" "harvestfs_mount_connected" []
        Stable: "1 while the namenode can be reached.";

    CHAOS_OPERATION_SECONDS = Chaos Latency "s" "harvestfs_chaos_operation_seconds" ["operation"]
        Stable: "How long the clients' operations took that went well: read, write (of whole files), rename, unlink.";
    CHAOS_FAILURES_TOTAL = Chaos WholeCounter "operations" "harvestfs_chaos_failures_total" ["operation"]
        Stable: "Operations of clients that failed.";
    CHAOS_FAULTS_TOTAL = Chaos WholeCounter "faults" "harvestfs_chaos_faults_total" ["kind"]
        Stable: "Faults that were inflicted, by their kind in the scenario.";
    CHAOS_SERVERS = Chaos Gauge "servers" "harvestfs_chaos_servers" ["condition"]
        Stable: "Servers that are down, hung, busy, cut (off) or full just now because of a fault.";
    CHAOS_BLOCKS = Chaos Gauge "blocks" "harvestfs_chaos_blocks" []
        Stable: "Blocks of which a replica lies on a disk.";
    CHAOS_UNAVAILABLE_BLOCKS = Chaos Gauge "blocks" "harvestfs_chaos_unavailable_blocks" []
        Stable: "Of these, blocks all of whose replicas are on servers that cannot be used just now.";
    CHAOS_ROTTEN_REPLICAS = Chaos Gauge "replicas" "harvestfs_chaos_rotten_replicas" []
        Stable: "Replicas of which a bit was flipped and that their datanode still takes for good.";
    CHAOS_PRIMARY_SLOWDOWN_RATIO = Chaos Gauge "ratio" "harvestfs_chaos_primary_slowdown_ratio" []
        Stable: "How much slower a primary computes than before the cluster was started, since clients work; NaN while that is not known.";
    CHAOS_BROKEN_PROMISES_TOTAL = Chaos WholeCounter "promises" "harvestfs_chaos_broken_promises_total" ["kind"]
        Stable: "What was acknowledged and found otherwise in the end: files that are lost or hold wrong bytes, names that are there unexpected.";
}
