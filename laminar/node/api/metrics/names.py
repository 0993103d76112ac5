"""All families of metrics of a node: name, type, help and labels. `/metrics` has no other.

`OF_PROCESSES` are numbers of a process, by its part and the key in that part's statistics; a test finds keys
without a row here. `OTHERS` are summed by topic, consumer, channel and so on (`text`). Units are seconds,
bytes and plain numbers. A counter begins at 0 with its process, or with the leadership that it counts for.
docs/metrics.md is written from this table (`python -m tests.node.api.metrics.page`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram", "summary"]


class Family(NamedTuple):
    """A family of metrics. A counter's samples have `_total` behind its name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("process",)
    scale: float = 1.0
    """The factor by which the statistic is multiplied: 0.001 for one in ms."""

    @property
    def sample(self) -> str:
        """The name of the family's samples; a histogram or summary has several (`samples`)."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """The unit at the end of the family's name; empty for a plain number."""
        return next((unit for unit in ("seconds", "bytes") if self.name.endswith(f"_{unit}")), "")


NOT_SHOWN: Final = {
    ("storage", "journal_syncs"): "counted by the histogram laminar_disk_sync_seconds",
    ("storage", "journal_syncs_us"): "summed by the histogram laminar_disk_sync_seconds",
    ("loop", "lag_seconds"): "summed by the histogram laminar_loop_delay_seconds",
    ("loop", "ticks"): "counted by the histogram laminar_loop_delay_seconds",
    ("http", "responses_2xx"): "counted by the histogram laminar_http_request_duration_seconds",
    ("http", "responses_3xx"): "counted by the histogram laminar_http_request_duration_seconds",
    ("http", "responses_4xx"): "counted by the histogram laminar_http_request_duration_seconds",
    ("http", "responses_5xx"): "counted by the histogram laminar_http_request_duration_seconds",
    ("catalog", "leader"): "laminar_catalog_is_led",
}
"""Statistics that are no metrics, by part and key, with the place where they are shown instead."""


def _part(
    part: str, *rows: tuple[str, Kind, str] | tuple[str, Kind, str, str, float]
) -> Iterator[tuple[tuple[str, str], Family]]:
    """Yield the families of a part of the process, each with its (part, key).

    A row has key, kind and help, and optionally another name and the factor to the unit of that name.
    """
    for row in rows:
        key, kind, text = row[:3]
        name, scale = (row[3], row[4]) if len(row) == 5 else (f"laminar_{part}_{key}", 1.0)
        yield (part, key), Family(name, kind, text, scale=scale)


OF_PROCESSES: Final[dict[tuple[str, str], Family]] = dict(
    (
        *_part(
            "storage",
            ("journal_lsn", "gauge", "Sequence number of the journal's last frame"),
            ("journal_file", "gauge", "Number of the journal file that is written to"),
            ("journal_files", "gauge", "Journal files without a checkpoint; at 8 appends are refused"),
            (
                "journal_position",
                "gauge",
                "Where the journal file is written",
                "laminar_storage_journal_position_bytes",
                1,
            ),
            (
                "journal_capacity",
                "gauge",
                "Size of a journal file",
                "laminar_storage_journal_capacity_bytes",
                1,
            ),
            (
                "journal_longest_sync_us",
                "gauge",
                "The longest sync of the journal since the start",
                "laminar_disk_longest_sync_seconds",
                1e-6,
            ),
            ("frames", "counter", "Frames written to the journal"),
            ("interval_syncs", "counter", "Syncs for topics with flush=interval"),
            ("markers", "counter", "Marks of durable frames written to the journal"),
            ("pending_bytes", "gauge", "Bytes recorded that are not in the journal yet"),
            ("recent_bytes", "gauge", "Bytes kept in memory until they are in a segment"),
            ("unwritten_bytes", "gauge", "Bytes in the journal that are not in a segment yet"),
            ("checkpoints", "counter", "Checkpoints written"),
            ("failed_checkpoints", "counter", "Checkpoints that could not be written"),
            (
                "journal_bytes_since_checkpoint",
                "gauge",
                "Bytes that a start after a crash would replay",
                "laminar_storage_replay_bytes",
                1,
            ),
            ("logs", "gauge", "Logs of replicas that are open"),
            ("logs_recovering", "gauge", "Logs that may have forgotten entries: their votes do not count"),
            ("cold_reads", "counter", "Reads that the page cache could not answer"),
            ("reads_waiting", "gauge", "Reads that wait for a reader thread"),
            ("row_chunks_loaded", "counter", "Chunks of index entries read from index files"),
            ("ahead_bytes", "gauge", "Bytes read ahead and held"),
            ("row_bytes", "gauge", "Index entries in memory"),
            ("open_files", "gauge", "Files of logs that are open"),
            ("damage_found", "counter", "Damaged batches found"),
            ("damage_repaired", "counter", "Damaged batches repaired"),
            ("damage_repairs_refused", "counter", "Repairs refused, as they were not the missing batch"),
            ("damage_quarantined", "gauge", "Batches that are damaged now"),
            ("failed_logs", "gauge", "Logs that stopped, as a write or sync failed"),
        ),
        *_part(
            "repair",
            ("asked", "counter", "Requests to other replicas for damaged entries"),
            ("answered", "counter", "Requests of other replicas for damaged entries that were answered"),
            ("repaired", "counter", "Entries repaired from another replica"),
            ("refused", "counter", "Answers that were not the missing entry"),
            ("missing", "counter", "Replicas asked that did not have the entry"),
            ("gone", "gauge", "Damaged ranges that no replica has"),
        ),
        *_part(
            "scrub",
            ("verified_bytes", "counter", "Bytes verified", "laminar_scrub_bytes", 1),
            ("verified_segments", "counter", "Segments verified", "laminar_scrub_segments", 1),
            ("sealed_segments", "gauge", "Segments that are sealed"),
            ("waiting_segments", "gauge", "Segments left in this pass"),
            (
                "oldest_unverified_age_s",
                "gauge",
                "Time since the next segment was last verified",
                "laminar_scrub_oldest_unverified_seconds",
                1,
            ),
            ("damaged_batches", "counter", "Damaged batches that the scrubber found"),
            ("errors", "counter", "Segments that could not be read"),
        ),
        *_part(
            "find",
            ("unindexed_bytes", "gauge", "Bytes of sealed segments without the key index of their topic"),
            ("indexed_segments", "counter", "Segments of which a key index was built"),
            ("indexed_bytes", "counter", "Bytes of these segments"),
            ("errors", "counter", "Key indexes that could not be built; their segments are scanned"),
        ),
        *_part(
            "http",
            ("bytes_in", "counter", "Bytes received from clients", "laminar_http_received_bytes", 1),
            ("bytes_out", "counter", "Bytes sent to clients", "laminar_http_sent_bytes", 1),
            ("connections", "counter", "Connections accepted"),
            ("displaced", "counter", "Connections without a principal that were ended for newer ones"),
            ("muted", "counter", "Times that a connection was not read, as its principal was over a rate"),
            ("reads", "gauge", "Reads that have begun and have no answer yet"),
            ("reads_refused", "counter", "Reads that might wait, and were refused: too many had no answer"),
            ("refused", "counter", "Requests that were no valid HTTP, or over a limit"),
            ("requests", "counter", "Requests received"),
            ("slow_readers", "counter", "Connections ended, as the client did not read its answers"),
            ("timed_out", "counter", "Connections ended, as the client sent too little"),
            ("tls_failed", "counter", "TLS handshakes of clients that failed"),
            ("open_connections", "gauge", "Connections that are open"),
            ("reserved_bytes", "gauge", "Bytes of bodies that are held or announced"),
            ("answer_bytes", "gauge", "Bytes of large answers that are not sent yet"),
            ("turns", "counter", "Turns of the loop in which principals shared the time"),
            ("waits_for_turn", "counter", "Requests that waited for their principal's next turn"),
        ),
        *_part(
            "bulk",
            ("on_their_way_bytes", "gauge", "Bytes of large bodies that have begun and are not committed"),
            ("waiting", "gauge", "Large bodies that wait to begin"),
            ("waits", "counter", "Large bodies that had to wait"),
            ("rests", "counter", "Rests after large bodies, in which small appends had the disk"),
            ("bytes", "counter", "Bytes of large bodies that have begun"),
        ),
        *_part(
            "transport",
            ("connections_made", "counter", "Connections made to other processes"),
            ("connections_accepted", "counter", "Connections accepted of other processes"),
            ("connections_sealed", "counter", "Connections whose frames have a MAC"),
            ("connects_failed", "counter", "Connections that could not be made"),
            ("frames_received", "counter", "Frames received"),
            ("frames_dropped", "counter", "Frames dropped, as a connection's queue was full"),
            ("frames_too_large", "counter", "Frames that were too large to be sent"),
            ("frames_forged", "counter", "Frames with a wrong MAC"),
            ("protocol_errors", "counter", "Connections ended for a wrong frame"),
            ("peers_lost", "counter", "Processes whose connections all ended"),
            ("silent", "counter", "Connections ended, as nothing came for long"),
            ("peers", "gauge", "Processes that are connected"),
            ("unauthenticated", "gauge", "Connections whose handshake is under way"),
            ("queued_bytes", "gauge", "Bytes that wait to be sent"),
            ("calls_waiting", "gauge", "Calls to others that are not answered yet"),
            ("calls_working", "gauge", "Calls of others that are worked on"),
            ("calls_answered", "counter", "Calls of others that were answered"),
            ("calls_failed", "counter", "Calls of others that failed"),
        ),
        *_part(
            "tls",
            ("loaded", "counter", "Times that the certificate files were loaded", "laminar_tls_loads", 1),
            ("load_failures", "counter", "Times that the certificate files could not be used"),
            (
                "certificate_left_s",
                "gauge",
                "How long the certificate is still valid",
                "laminar_tls_certificate_left_seconds",
                1,
            ),
            (
                "ca_left_s",
                "gauge",
                "How long the first CA to end is still valid",
                "laminar_tls_ca_left_seconds",
                1,
            ),
        ),
        *_part(
            "secret",
            ("accepted", "gauge", "Secrets that are accepted: 2 while one is replaced"),
            ("loaded", "counter", "Times that secrets were loaded", "laminar_secret_loads", 1),
            ("load_failures", "counter", "Times that the file of the secret could not be used"),
        ),
        *_part(
            "raft",
            ("groups", "gauge", "Groups that are driven here"),
            ("stopped_replicas", "gauge", "Replicas stopped by a bug of Laminar"),
            ("leading", "gauge", "Groups that are led here"),
            ("quiesced_groups", "gauge", "Groups without timers, as they are idle"),
            ("unquiesced", "counter", "Groups that were idle and are active again"),
            ("keepalives_sent", "counter", "Keepalives for idle groups sent"),
            ("proposals", "counter", "Entries proposed"),
            ("syncs", "counter", "Syncs that entries waited for"),
            ("dropped_messages", "counter", "Messages dropped: no connection, no room, or an unknown group"),
            ("bad_frames", "counter", "Frames that could not be decoded"),
            ("refused_frames", "counter", "Frames of processes that may not take part"),
            ("second_leaders", "counter", "Terms with two leaders: acknowledged records may be lost"),
            ("stalls", "counter", "Times that the loop was late by an election timeout"),
            ("receive_pauses", "counter", "Times that receiving paused for want of room"),
            ("elections_waiting", "gauge", "Elections that wait for their turn"),
            ("elections", "counter", "Elections that replicas of this process won"),
            ("leaderships_lost", "counter", "Leaderships that replicas of this process lost or gave away"),
        ),
        *_part(
            "loop",
            (
                "long_turns",
                "counter",
                "Turns of the event loop of more than 100 ms (of more than 350 ms in an idle process)",
            ),
            (
                "lag_max_seconds",
                "gauge",
                "The longest delay of a timer since the start",
                "laminar_loop_longest_delay_seconds",
                1,
            ),
            ("collections", "counter", "Collections of garbage"),
        ),
        *_part(
            "node",
            ("lost_replicas", "gauge", "Replicas whose files are missing"),
            ("recovering_replicas", "gauge", "Replicas that may have forgotten entries"),
            (
                "disk_free_bytes",
                "gauge",
                "Free space of the data folder's disk",
                "laminar_disk_free_bytes",
                1,
            ),
            (
                "disk_low_water_bytes",
                "gauge",
                "Free space below which appends are refused",
                "laminar_disk_low_water_bytes",
                1,
            ),
            (
                "disk_is_low",
                "gauge",
                "1 while appends are refused for want of space",
                "laminar_disk_is_low",
                1,
            ),
            ("log_starts_moved", "counter", "Log starts that retention moved"),
            ("log_starts_held", "gauge", "Logs that are kept longer for a replica that lags"),
            (
                "work_missed",
                "counter",
                "Changes of the catalog that were overlooked, and carried out late: a bug of Laminar",
            ),
            ("topics_with_fewer_replicas", "gauge", "Topics with fewer replicas than they ask for"),
            (
                "catalog_is_led",
                "gauge",
                "1 while this process knows a leader of the catalog",
                "laminar_catalog_is_led",
                1,
            ),
            ("open_files_limit", "gauge", "Files that the process may open"),
        ),
        *_part(
            "catch_up",
            ("served_bytes", "counter", "Bytes of segments sent to replicas that lag"),
            ("serving", "gauge", "Replicas that are served now"),
            ("received_bytes", "counter", "Bytes of segments received"),
            ("receiving", "gauge", "Replicas that receive segments now"),
            ("installed", "counter", "Logs installed from segments"),
            ("abandoned", "counter", "Catch-ups that ended without a log"),
            ("offers", "counter", "Offers of segments made to replicas"),
        ),
        *_part(
            "moves",
            ("steps", "counter", "Steps of placement taken"),
            ("made", "counter", "Replicas made"),
            ("deleted", "counter", "Replicas deleted"),
        ),
        *_part(
            "leaders",
            ("handed_over", "counter", "Leaderships handed over to preferred nodes"),
            ("refused", "counter", "Leaderships that the other node did not take"),
            ("handing_over", "gauge", "Leaderships that are being handed over"),
        ),
        *_part(
            "routes",
            ("sealed", "counter", "Partitions sealed for a change of route"),
            ("opened", "counter", "Partitions opened by a change of route"),
            ("splits_by_load", "counter", "Splits that this process began because of load"),
            ("under_way", "gauge", "Changes of routes that this node drives"),
            (
                "closing_longest_ms",
                "gauge",
                "Longest time for which the keys of a change have not been writable",
                "laminar_routes_closing_longest_seconds",
                0.001,
            ),
        ),
        *_part(
            "channels",
            ("opened", "counter", "Channels of partitions opened or changed"),
            ("closed", "counter", "Channels of partitions closed"),
            ("given", "counter", "Records given out"),
            ("repeated", "counter", "Records given out again"),
            ("acknowledged", "counter", "Records acknowledged"),
            ("late", "counter", "Acknowledgements, nacks and releases that came after the record's time"),
            ("died", "counter", "Records that failed too often"),
            ("copied", "counter", "Open records copied to the log's end, so that it can be trimmed"),
        ),
        *_part(
            "delayed",
            ("published", "counter", "Delayed records published"),
            ("copied", "counter", "Delayed records copied to the log's end"),
            ("sent", "counter", "Delayed records sent to partitions that replace an ended one"),
            ("pending", "gauge", "Delayed records that are pending"),
            ("late_seconds", "gauge", "How late the last delayed record was published"),
        ),
        *_part(
            "datagrams",
            ("received", "counter", "Datagrams received"),
            ("forged", "counter", "Datagrams with a wrong MAC"),
            ("dropped", "counter", "Datagrams dropped for want of room"),
            ("appended", "counter", "Datagrams appended"),
            ("repeated", "counter", "Datagrams that had come before"),
            ("redirected", "counter", "Datagrams answered with the leader's address"),
            ("refused", "counter", "Datagrams refused"),
            ("waiting", "gauge", "Datagrams that wait for their answers"),
        ),
        *_part(
            "audit",
            ("calls", "counter", "Calls of admins to be recorded"),
            ("refused", "counter", "Refusals to be recorded"),
            ("written", "counter", "Records written to `_audit`"),
            ("dropped", "counter", "Records that are in the node's log only"),
            ("waiting", "gauge", "Records that wait to be written"),
        ),
        *_part(
            "trace",
            ("events", "counter", "Events of records that are traced"),
            ("written", "counter", "Events written to `_trace`"),
            ("dropped", "counter", "Events that were dropped: no room, or `_trace` accepted none"),
            ("waiting", "gauge", "Events that wait to be written"),
        ),
        *_part(
            "catalog",
            ("term", "gauge", "Term of the catalog's group"),
            ("version", "gauge", "Version of the catalog"),
            ("voters", "gauge", "Voters of the catalog"),
        ),
        *_part(
            "gossip",
            ("received", "counter", "Datagrams of gossip received"),
            ("sent", "counter", "Datagrams of gossip sent"),
            ("bad_signature", "counter", "Datagrams of gossip with a wrong MAC"),
            ("malformed", "counter", "Datagrams of gossip that could not be decoded"),
            ("oversize", "counter", "Datagrams of gossip that were too large"),
            ("unsent", "counter", "Datagrams of gossip that could not be sent"),
            ("unresolved", "counter", "Addresses that could not be resolved"),
            ("replayed", "counter", "Datagrams of gossip that came again, or for another process"),
            ("challenged", "counter", "Datagrams of gossip whose sender had to answer a challenge"),
            ("asked_again", "counter", "Probes that were sent again after a challenge"),
            ("outdated", "counter", "Datagrams of gossip of an older version"),
            ("refutations", "counter", "Claims about this node that it refuted"),
            ("namesakes", "counter", "Datagrams of other nodes under this node's name"),
            ("doubt", "gauge", "How far this node doubts its own connection, from 0"),
        ),
    )
)
"""By part and key of a process's statistics."""

_TOPIC: Final = ("topic",)
_CONSUMER: Final = ("topic", "consumer")
_CHANNEL: Final = ("topic", "channel")
_PARTITION: Final = ("topic", "partition")

PROCESS_UP: Final = Family("laminar_process_up", "gauge", "1 where a process of this node answers")
BUILD: Final = Family(
    "laminar_build_info",
    "gauge",
    "1, with the program's version, and whether its modules are pure or compiled",
    ("version", "python", "modules"),
)
HTTP_DURATION: Final = Family(
    "laminar_http_request_duration_seconds",
    "histogram",
    "Time from a whole request to its answer, less the wait that the client asked for (wait_ms)",
    ("operation", "code"),
)
APPEND_COMMIT: Final = Family(
    "laminar_append_commit_seconds",
    "histogram",
    "Time from the proposal of an entry to its commit, to a millisecond",
)
DISK_SYNC: Final = Family("laminar_disk_sync_seconds", "histogram", "Time of a sync of the journal")
LOOP_DELAY: Final = Family(
    "laminar_loop_delay_seconds",
    "histogram",
    "How late the event loop calls a timer, every 50 ms (250 if idle)",
)
TRANSPORT_REFUSED: Final = Family(
    "laminar_transport_refused",
    "counter",
    "Connections between processes that were refused",
    ("process", "reason"),
)
TRANSPORT_CONNECTIONS: Final = Family(
    "laminar_transport_connections", "gauge", "Connections to other processes", ("process", "channel")
)
PARTITIONS: Final = Family(
    "laminar_partitions",
    "gauge",
    "Partitions led here that are `waiting`, `open` or `sealed` by the route, `under_replicated` or "
    "`refusing` appends; replicas here that are `leaderless`, `stopped` or `damaged`",
    ("state",),
)
UNDRAINED: Final = Family(
    "laminar_undrained_cursors",
    "gauge",
    "Cursors before the ends of partitions which have ended, and which this node leads",
    (),
)
SERIES_LEFT_OUT: Final = Family(
    "laminar_series_left_out", "gauge", "Consumers beyond the 5,000 of a node that have metrics", ()
)
PRINCIPAL_REFUSED: Final = Family(
    "laminar_principal_refused", "counter", "Requests refused for a limit of their principal", ("principal",)
)
ROUTE_CHANGES: Final = Family(
    "laminar_route_changes",
    "counter",
    "Changes of routes that ended while this node led the catalog",
    ("result",),
)
ROUTE_PHASE: Final = Family(
    "laminar_route_phase_seconds", "summary", "How long a phase of a change of a route took", ("phase",)
)

OF_TOPICS: Final = (
    Family("laminar_append_records", "counter", "Records appended by the topic's leaders here", _TOPIC),
    Family("laminar_append_bytes", "counter", "Bytes of batches appended by the leaders here", _TOPIC),
    Family("laminar_fetch_records", "counter", "Records in batches that replicas here served", _TOPIC),
    Family("laminar_fetch_bytes", "counter", "Bytes of batches that replicas here served", _TOPIC),
    Family("laminar_log_bytes", "gauge", "Bytes of the topic's replicas here", _TOPIC),
    Family("laminar_leaders", "gauge", "Partitions of the topic that this node leads", _TOPIC),
    Family("laminar_route_version", "gauge", "Version of the topic's route", _TOPIC),
    Family(
        "laminar_staged_batches",
        "gauge",
        "Batches of sinks staged and not published, of leaders here",
        _TOPIC,
    ),
    Family("laminar_staged_bytes", "gauge", "Bytes of these batches", _TOPIC),
    Family("laminar_retention_seconds", "gauge", "The topic's retention_ms, where it is set", _TOPIC),
)
"""Sums over the partitions of a topic of which this node has a replica."""

OF_CONSUMERS: Final = (
    Family(
        "laminar_consumer_lag_records",
        "gauge",
        "Records between the consumer and the ends, of leaders here",
        _CONSUMER,
    ),
    Family(
        "laminar_consumer_lag_records_max",
        "gauge",
        "The same, of the partition with the largest lag",
        _CONSUMER,
    ),
    Family(
        "laminar_consumer_lag_seconds",
        "gauge",
        "Upper limit of the age of the oldest record that the consumer has not read; 0: it has read all",
        _CONSUMER,
    ),
    Family(
        "laminar_consumer_overtaken_records",
        "counter",
        "Records that retention deleted before the consumer read them",
        _CONSUMER,
    ),
)
"""Families of cursors, including consumer groups': sums over the partitions that this node leads."""

OF_CHANNELS: Final = (
    Family(
        "laminar_channel_depth",
        "gauge",
        "Records that are out, and an upper limit of those that were never given out",
        _CHANNEL,
    ),
    Family("laminar_channel_out", "gauge", "Records that are out", _CHANNEL),
    Family("laminar_channel_aside", "gauge", "Records that wait for a retry", _CHANNEL),
    Family("laminar_channel_dead", "gauge", "Records that failed too often", _CHANNEL),
    Family("laminar_channel_lost", "gauge", "Records that left the log before they were done", _CHANNEL),
    Family(
        "laminar_channel_kept_bytes",
        "gauge",
        "Bytes that retention would trim if the channel did not need them",
        _CHANNEL,
    ),
)
"""Families of the state of channels in the partitions that this node leads."""

OF_CHANNEL_COUNTS: Final = (
    Family("laminar_channel_acknowledged", "counter", "Records acknowledged", _CHANNEL),
    Family("laminar_channel_redelivered", "counter", "Records given out again", _CHANNEL),
    Family(
        "laminar_channel_late",
        "counter",
        "Acknowledgements, nacks and releases that came after the record's time",
        _CHANNEL,
    ),
    Family(
        "laminar_channel_died",
        "counter",
        "Records that became dead",
        _CHANNEL,
    ),
    Family(
        "laminar_channel_overdue",
        "counter",
        "Records given out again more than a second after their time",
        _CHANNEL,
    ),
)
"""Families of counters of channels' records, while this node led their partitions."""

OF_PARTITIONS: Final = (
    Family("laminar_partition_leader", "gauge", "1 where this node leads the partition", _PARTITION),
    Family(
        "laminar_partition_failed", "gauge", "1 where the partition's replica here has stopped", _PARTITION
    ),
    Family("laminar_partition_start_offset", "gauge", "Earliest offset of the replica", _PARTITION),
    Family("laminar_partition_end_offset", "gauge", "Committed end offset of the replica", _PARTITION),
    Family("laminar_partition_log_bytes", "gauge", "Bytes of the replica", _PARTITION),
    Family("laminar_partition_append_records", "counter", "Records appended as leader", _PARTITION),
    Family("laminar_partition_append_bytes", "counter", "Bytes of batches appended as leader", _PARTITION),
    Family("laminar_partition_fetch_bytes", "counter", "Bytes of batches served to readers", _PARTITION),
    Family("laminar_partition_staged_batches", "gauge", "Batches of sinks staged, as leader", _PARTITION),
)
"""Families of partitions, only with ``detail=partitions`` and a topic."""

OTHERS: Final = (
    *(PROCESS_UP, BUILD, HTTP_DURATION, APPEND_COMMIT, DISK_SYNC, LOOP_DELAY),
    *(TRANSPORT_REFUSED, TRANSPORT_CONNECTIONS, PARTITIONS, UNDRAINED, SERIES_LEFT_OUT),
    *(PRINCIPAL_REFUSED, ROUTE_CHANGES, ROUTE_PHASE),
    *(*OF_TOPICS, *OF_CONSUMERS, *OF_CHANNELS, *OF_CHANNEL_COUNTS, *OF_PARTITIONS),
)

ALL: Final = (*OTHERS, *OF_PROCESSES.values())


def samples(family: Family) -> tuple[str, ...]:
    """Return the names of a family's samples, as they are used in queries."""
    if family.kind == "histogram":
        return tuple(f"{family.name}_{each}" for each in ("bucket", "sum", "count"))
    if family.kind == "summary":
        return (f"{family.name}_sum", f"{family.name}_count")
    return (family.sample,)
