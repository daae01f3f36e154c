//! The table of metrics: every metric of every part.

use super::{Kind, Metric, Part, Stability};

/// Names each metric for the compiler and for Prometheus, and collects all of them in [`TABLE`].
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
        Stable: "Time from when the namenode begins a request to its reply. It includes waiting for the journal and for other clients to invalidate their caches.";
    NAMENODE_REFUSALS_TOTAL = Namenode WholeCounter "requests" "harvestfs_namenode_refusals_total" ["operation"]
        Stable: "Requests that were answered with an error. A lookup of a name that does not exist counts too.";
    NAMENODE_JOURNAL_SECONDS = Namenode Latency "s" "harvestfs_namenode_journal_seconds" []
        Stable: "Time from when records are handed to the journal until they are on stable storage, for records that a reply waits for.";
    NAMENODE_JOURNAL_BYTES_TOTAL = Namenode WholeCounter "bytes" "harvestfs_namenode_journal_bytes_total" []
        Stable: "Bytes of records written to the journal.";
    NAMENODE_JOURNAL_RECORD = Namenode Gauge "records" "harvestfs_namenode_journal_record" []
        Internal: "Number of the last record of the journal.";
    NAMENODE_LEADS = Namenode Gauge "1" "harvestfs_namenode_leads" []
        Stable: "1 while this namenode leads and serves clients. 0 while it is a standby, while nobody leads, and when it was elected but has reached no majority for 2 s. Exactly one of a group has 1: alert when their sum is 0.";
    NAMENODE_KNOWS_LEADER = Namenode Gauge "1" "harvestfs_namenode_knows_leader" []
        Stable: "1 while this namenode knows of one that leads, itself or another, 0 otherwise; also when it has heard nothing of that one for 2 s.";
    NAMENODE_TERM = Namenode Gauge "1" "harvestfs_namenode_term" []
        Stable: "The last term that this namenode knows of; each leadership has another one.";
    NAMENODE_CLUSTER_VERSION = Namenode Gauge "1" "harvestfs_namenode_cluster_version" []
        Stable: "The version of the cluster, as far as this namenode knows; `harvestfs admin upgrade finish` raises it.";
    NAMENODE_NEWEST_VERSION = Namenode Gauge "1" "harvestfs_namenode_newest_version" []
        Stable: "The newest version that a namenode or datanode has; above that of the cluster, an upgrade is under way.";
    NAMENODE_BEHIND_RECORDS = Namenode Gauge "records" "harvestfs_namenode_behind_records" []
        Stable: "Committed records, as far as this namenode has heard from the leader, that it has not executed yet; always 0 on the leader.";
    NAMENODE_MEMBER = Namenode Gauge "1" "harvestfs_namenode_member" ["address"]
        Stable: "The namenodes of the group, as this one sees it, by address: 1 for the one that leads, 0 for the others; 0 for all while nobody leads.";
    NAMENODE_READY = Namenode Gauge "1" "harvestfs_namenode_ready" []
        Stable: "1 once the locations of blocks are known after a start, 0 before. Whether a namenode leads, `harvestfs_namenode_leads` says.";
    NAMENODE_RECOVERING = Namenode Gauge "1" "harvestfs_namenode_recovering" []
        Stable: "1 while the namenode is in recovery: datanodes know newer records than it has, so it changes nothing. 0 otherwise.";
    NAMENODE_REFUSED_DATANODES = Namenode Gauge "datanodes" "harvestfs_namenode_refused_datanodes" []
        Stable: "Datanodes that are refused because they obey another namenode of this cluster, one that started later.";
    NAMENODE_QUARANTINED_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_quarantined_blocks" []
        Stable: "Blocks in quarantine: this namenode never allocated them, and datanodes keep their replicas for a limited time.";
    NAMENODE_QUARANTINED_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_quarantined_bytes" []
        Stable: "Space that the replicas of blocks in quarantine take.";
    NAMENODE_REPAIR_HELD_SECONDS = Namenode Gauge "s" "harvestfs_namenode_repair_held_seconds" []
        Stable: "Longest time for which repair still waits because many datanodes fell silent together; 0 if it does not wait.";
    NAMENODE_INODES = Namenode Gauge "inodes" "harvestfs_namenode_inodes" ["kind"]
        Stable: "Inodes by kind: file, directory, other.";
    NAMENODE_SESSIONS = Namenode Gauge "sessions" "harvestfs_namenode_sessions" []
        Stable: "Open sessions of clients.";
    NAMENODE_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_blocks" []
        Stable: "Blocks that files use or sessions write.";
    NAMENODE_MISSING_REPLICAS_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_missing_replicas_blocks" ["left"]
        Stable: "Sealed blocks with fewer replicas than wanted, by how many replicas are left: 0, 1, 2, more.";
    NAMENODE_LOST_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_lost_blocks" []
        Stable: "Blocks that hold data and have no known replica.";
    NAMENODE_CURTAILED_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_curtailed_blocks" []
        Stable: "Sealed blocks that have fewer replicas, or satisfy fewer constraints, than their files ask for, because the cluster has too few datanodes.";
    NAMENODE_WRITE_REPLICAS = Namenode Gauge "replicas" "harvestfs_namenode_write_replicas" ["number"]
        Stable: "Replicas of a new block with the default rules. `wanted`: asked for. `possible`: with all datanodes of the cluster. `at_once`: with those available now. `needed`: the least with which a write goes on. While `at_once` is below `needed`, writes wait or are refused; while it is below `possible`, new blocks have fewer replicas for now.";
    NAMENODE_WRITABLE_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_writable_bytes" []
        Stable: "Bytes of files that can be written now with the default rules; 0 while writes wait or are refused.";
    NAMENODE_MISPLACED_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_misplaced_blocks" []
        Stable: "Sealed blocks that break a constraint of placement that they were promised.";
    NAMENODE_DIVERSITY_BLOCKS = Namenode Gauge "blocks" "harvestfs_namenode_diversity_blocks" ["score"]
        Stable: "Sealed blocks, by how many of the five constraints of placement their replicas satisfy: 0 to 5.";
    NAMENODE_REPAIRS_WAITING = Namenode Gauge "blocks" "harvestfs_namenode_repairs_waiting" ["reason"]
        Stable: "Blocks that wait for repair (`missing`) or for the move of a replica (`misplaced`).";
    NAMENODE_REPAIRS_UNDER_WAY = Namenode Gauge "blocks" "harvestfs_namenode_repairs_under_way" []
        Stable: "Repairs and moves in flight.";
    NAMENODE_REPAIR_OLDEST_SECONDS = Namenode Gauge "s" "harvestfs_namenode_repair_oldest_seconds" []
        Stable: "How long the block that has waited longest for repair has been waiting; 0 if none waits.";
    NAMENODE_REPAIRS_TOTAL = Namenode WholeCounter "repairs" "harvestfs_namenode_repairs_total" ["result"]
        Stable: "Repairs and moves that ended: repaired, moved, failed.";
    NAMENODE_REIMAGES_TOTAL = Namenode WholeCounter "reimages" "harvestfs_namenode_reimages_total" []
        Stable: "Known servers that came back with an empty disk.";
    NAMENODE_DATANODES = Namenode Gauge "datanodes" "harvestfs_namenode_datanodes" ["state"]
        Stable: "Datanodes by state: free, busy (their owner needs the server), maintenance (they may be away), dead.";
    NAMENODE_QUOTA_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_quota_bytes" []
        Stable: "Sum of the quotas of live datanodes.";
    NAMENODE_USED_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_used_bytes" []
        Stable: "Bytes that live datanodes use of their quotas.";
    NAMENODE_SERVER_USE_RATIO = Namenode Gauge "ratio" "harvestfs_namenode_server_use_ratio" ["server"]
        Stable: "Share of its quota that a live server uses, for the `fullest` and the `emptiest` server. They stay far apart while balancing is off, finds no place within the constraints, or has no budget left. NaN if there is none.";
    NAMENODE_BALANCE_MOVES_TOTAL = Namenode WholeCounter "moves" "harvestfs_namenode_balance_moves_total" []
        Stable: "Replicas moved by balancing. `harvestfs_namenode_repairs_total` counts them too.";
    NAMENODE_TOO_FULL_VOLUMES = Namenode Gauge "volumes" "harvestfs_namenode_too_full_volumes" ["outcome"]
        Stable: "Volumes that are too full compared with other servers, by the outcome of the last search for a replica to move. `begun`: a move began. `budget`: the budget of moves is used up. `constraints`: the constraints of placement allow no move. `no_target`: no emptier server has space. `unsettled`: its blocks are being written or repaired. `unavailable`: its server is busy or silent.";
    NAMENODE_CELL_CAPACITY_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_cell_capacity_bytes" ["row", "column"]
        Stable: "Space in a cell of the grid of tenants. Row 0 has the lowest peaks of CPU use, column 0 the fewest reimages.";
    NAMENODE_CELL_FREE_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_cell_free_bytes" ["row", "column"]
        Stable: "Free space of a cell of the grid.";
    NAMENODE_CELL_SERVERS = Namenode Gauge "servers" "harvestfs_namenode_cell_servers" ["row", "column"]
        Stable: "Servers of a cell of the grid.";
    NAMENODE_CLASSES = Namenode Gauge "classes" "harvestfs_namenode_classes" ["pattern"]
        Stable: "Utilisation classes, by the pattern of their tenants: periodic, constant, unpredictable.";
    NAMENODE_CLASS_SERVERS = Namenode Gauge "servers" "harvestfs_namenode_class_servers" ["pattern"]
        Stable: "Live servers in utilisation classes, by pattern; `none`: too little is known of their tenants.";
    NAMENODE_CLASS_CPU_RATIO = Namenode Gauge "ratio" "harvestfs_namenode_class_cpu_ratio" ["pattern"]
        Stable: "Share of the CPU that owners use now of the live servers in the classes of a pattern, on average; NaN if unknown.";
    NAMENODE_CLASS_HEADROOM_RATIO = Namenode Gauge "ratio" "harvestfs_namenode_class_headroom_ratio" ["pattern", "job"]
        Stable: "Share of the CPU of the live servers in the classes of a pattern that is expected to stay free of their owners while a short, medium or long job runs, on average; NaN if unknown. A third of each server belongs to its owner's bursts all the same.";
    NAMENODE_HARVEST_SCHEDULERS = Namenode Gauge "schedulers" "harvestfs_namenode_harvest_schedulers" []
        Stable: "Schedulers whose controllers (`harvestfs cycles yarn`, `kubernetes`) reported within the last 30 s; only the namenode that leads is told.";
    NAMENODE_HARVEST_OFFERED_CORES = Namenode Gauge "cores" "harvestfs_namenode_harvest_offered_cores" []
        Stable: "Cores that schedulers are offered: what owners leave beside their reserve.";
    NAMENODE_HARVEST_OFFERED_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_harvest_offered_bytes" []
        Stable: "Memory that schedulers are offered.";
    NAMENODE_HARVESTED_JOBS = Namenode Gauge "jobs" "harvestfs_namenode_harvested_jobs" []
        Stable: "Jobs that run on what owners leave.";
    NAMENODE_HARVESTED_CONTAINERS = Namenode Gauge "containers" "harvestfs_namenode_harvested_containers" []
        Stable: "Containers or pods of the jobs that controllers named; of each scheduler at most 256 jobs are named.";
    NAMENODE_HARVESTED_CORES = Namenode Gauge "cores" "harvestfs_namenode_harvested_cores" []
        Stable: "Cores of these containers.";
    NAMENODE_HARVESTED_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_harvested_bytes" []
        Stable: "Memory of these containers.";
    NAMENODE_ENGINE_BYTES = Namenode Gauge "bytes" "harvestfs_namenode_engine_bytes" []
        Internal: "Memory of the engine's tables, estimated from their capacity.";

    DATANODE_OPERATION_SECONDS = Datanode Latency "s" "harvestfs_datanode_operation_seconds" ["operation"]
        Stable: "Duration of an operation. `read`: a range, from the request to the last byte sent. `open`: until a pipeline is set up. `write`: a batch of packets, until it is on the disk. `seal`: sealing a replica. `repair`: fetching a whole replica. `scrub`: reading and verifying a piece.";
    DATANODE_FAILURES_TOTAL = Datanode WholeCounter "operations" "harvestfs_datanode_failures_total" ["operation"]
        Stable: "Operations that failed, without denials.";
    DATANODE_BYTES_TOTAL = Datanode WholeCounter "bytes" "harvestfs_datanode_bytes_total" ["direction", "purpose"]
        Stable: "Bytes of blocks by direction (read, written) and purpose: client, repair, scrub.";
    DATANODE_DENIALS_TOTAL = Datanode WholeCounter "denials" "harvestfs_datanode_denials_total" ["operation"]
        Stable: "Reads, writes and repairs that were denied or broken off because the primary tenant needs the server.";
    DATANODE_BUSY = Datanode Gauge "1" "harvestfs_datanode_busy" []
        Stable: "1 while the server is busy: the primary tenant needs it.";
    DATANODE_BUSY_SECONDS_TOTAL = Datanode Counter "s" "harvestfs_datanode_busy_seconds_total" []
        Stable: "How long the server has been busy since the start of the datanode.";
    DATANODE_PRIMARY_CPU_RATIO = Datanode Gauge "ratio" "harvestfs_datanode_primary_cpu_ratio" []
        Stable: "Share of all cores that the primary tenant uses; NaN if unknown.";
    DATANODE_PRIMARY_MEMORY_RATIO = Datanode Gauge "ratio" "harvestfs_datanode_primary_memory_ratio" []
        Stable: "Share of the memory that the primary tenant uses; NaN if unknown.";
    DATANODE_PRIMARY_STALLED_RATIO = Datanode Gauge "ratio" "harvestfs_datanode_primary_stalled_ratio" []
        Stable: "Share of the time in which some task of the primary tenant's cgroup waited for CPU, memory or a disk; the largest of the three (pressure stall information). NaN if the kernel does not measure it, if `source` is not `cgroup`, and while the cgroup is not there.";
    DATANODE_STREAMS = Datanode Gauge "streams" "harvestfs_datanode_streams" []
        Stable: "Open block streams.";
    DATANODE_REGISTERED = Datanode Gauge "1" "harvestfs_datanode_registered" []
        Stable: "1 while the datanode is registered with the namenode.";
    DATANODE_VOLUME_QUOTA_BYTES = Datanode Gauge "bytes" "harvestfs_datanode_volume_quota_bytes" ["storage"]
        Stable: "Quota of a volume.";
    DATANODE_VOLUME_USED_BYTES = Datanode Gauge "bytes" "harvestfs_datanode_volume_used_bytes" ["storage"]
        Stable: "Bytes used in a volume, reservations included.";
    DATANODE_VOLUME_HEALTHY = Datanode Gauge "1" "harvestfs_datanode_volume_healthy" ["storage"]
        Stable: "1 if the volume can be used. `storage` is the directory of a volume that could not be opened since the start.";

    MOUNT_OPERATION_SECONDS = Mount Latency "s" "harvestfs_mount_operation_seconds" ["operation"]
        Stable: "Time from when the mount begins a request of the kernel to its answer, by the kernel's name for the request. Requests that the kernel answers from its own caches do not count.";
    MOUNT_BYTES_TOTAL = Mount WholeCounter "bytes" "harvestfs_mount_bytes_total" ["direction"]
        Stable: "Bytes of files that the kernel was given (`read`) or handed over (`written`).";
    MOUNT_FETCHED_BYTES_TOTAL = Mount WholeCounter "bytes" "harvestfs_mount_fetched_bytes_total" ["way"]
        Stable: "Bytes of blocks, in whole chunks, that were read from datanodes: over the network (`network`), or from a file that a datanode on this host lent (`short_circuit`). Data from the mount's memory does not count.";
    MOUNT_DIRTY_BYTES = Mount Gauge "bytes" "harvestfs_mount_dirty_bytes" []
        Stable: "Written data in the mount's memory that is not yet committed.";
    MOUNT_DENIALS_TOTAL = Mount WholeCounter "denials" "harvestfs_mount_denials_total" []
        Stable: "Requests that datanodes put off (`Busy`), mostly because the primary tenant needs the server.";
    MOUNT_HEDGED_READS_TOTAL = Mount WholeCounter "reads" "harvestfs_mount_hedged_reads_total" []
        Stable: "Reads for which a second replica was asked because the first was slow.";
    MOUNT_CONNECTED = Mount Gauge "1" "harvestfs_mount_connected" []
        Stable: "1 while the namenode can be reached.";

    CHAOS_OPERATION_SECONDS = Chaos Latency "s" "harvestfs_chaos_operation_seconds" ["operation"]
        Stable: "Duration of successful operations of clients: read and write (of whole files), rename, unlink.";
    CHAOS_FAILURES_TOTAL = Chaos WholeCounter "operations" "harvestfs_chaos_failures_total" ["operation"]
        Stable: "Operations of clients that failed.";
    CHAOS_FAULTS_TOTAL = Chaos WholeCounter "faults" "harvestfs_chaos_faults_total" ["kind"]
        Stable: "Faults that were inflicted, by their kind in the scenario.";
    CHAOS_SERVERS = Chaos Gauge "servers" "harvestfs_chaos_servers" ["condition"]
        Stable: "Servers that a fault has made `down`, `hung`, `busy`, `cut` (off from the network) or `full`, at the moment.";
    CHAOS_BLOCKS = Chaos Gauge "blocks" "harvestfs_chaos_blocks" []
        Stable: "Blocks that have a replica on some disk.";
    CHAOS_UNAVAILABLE_BLOCKS = Chaos Gauge "blocks" "harvestfs_chaos_unavailable_blocks" []
        Stable: "Blocks whose replicas are all on servers that cannot be used at the moment.";
    CHAOS_ROTTEN_REPLICAS = Chaos Gauge "replicas" "harvestfs_chaos_rotten_replicas" []
        Stable: "Replicas in which a bit was flipped and that their datanode still takes for good.";
    CHAOS_PRIMARY_SLOWDOWN_RATIO = Chaos Gauge "ratio" "harvestfs_chaos_primary_slowdown_ratio" []
        Stable: "How much slower a primary tenant computes while clients work than it did before the cluster was started; NaN if unknown.";
    CHAOS_BROKEN_PROMISES_TOTAL = Chaos WholeCounter "promises" "harvestfs_chaos_broken_promises_total" ["kind"]
        Stable: "Acknowledged operations whose result was not found at the end: files that are lost or hold wrong bytes, and names that should not be there.";
}
