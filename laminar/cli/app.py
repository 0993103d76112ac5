"""The tree of commands, as a table: name, module, summary, one example.

A command's module is imported only when the command is called. Each help page ends with its example, which
`tests/cli/test_help.py` parses and, where it needs no server, runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import App, Group


@dataclass(frozen=True, slots=True)
class Command:
    """One row: `path` in words, `target` as ``module:function`` of `laminar.cli.commands`."""

    path: str
    target: str
    help: str
    example: str


@dataclass(frozen=True, slots=True)
class Family:
    """Commands that share their first word."""

    name: str
    help: str


FAMILIES = (
    Family("topic", "Create, list, describe, trim and delete topics."),
    Family("cursor", "Cursors: the positions of consumers."),
    Family("channel", "Channels: queues of a topic, from which each record goes to one consumer."),
    Family("delayed", "Delayed records: records that readers get at a later time."),
    Family("record", "Single records."),
    Family("trace", "The trace: what happened to records, and who did it."),
    Family("token", "Tokens: who may do what."),
    Family("limit", "Limits: how much each principal may use."),
    Family("sink", "Sinks: batches committed over several partitions."),
    Family("cluster", "The health of the cluster."),
    Family("node", "The nodes of the cluster."),
    Family("partition", "The placement of partitions."),
    Family("leader", "The leaders of partitions."),
    Family("operations", "The changes of placement that are under way."),
    Family("group", "Partitions whose replicas are lost for good."),
    Family("catalog", "The catalog of nodes, topics and placements."),
    Family("log", "Files of logs on this machine; no server is needed."),
    Family("system", "A node as a service of systemd."),
    Family("steer", "Steering of packets to the CPU of their shard by XDP, on this machine."),
    Family("bench", "Measure a cluster under load."),
    Family("pipeline", "Jobs on whole topics, run by Spark."),
    Family("cert", "A CA for a cluster, and certificates of its nodes and clients."),
    Family(
        "secret", "The secret that a cluster's nodes share, in a file of this machine; no server is needed."
    ),
    Family("context", "Names for clusters, so that no --url is needed."),
    Family("config", "The settings of a node."),
)

COMMANDS = (
    Command(
        "dev",
        "dev:dev",
        "Run a cluster on this machine, in the foreground, until Ctrl-C.",
        "laminar dev --nodes 3 --shards 2",
    ),
    Command(
        "serve",
        "serve:serve",
        "Run a node. Flags take precedence over variables LAMINAR_..., and these over --config.",
        "laminar serve --data /var/lib/laminar --join 127.0.0.1:7070",
    ),
    Command(
        "produce",
        "produce:produce",
        "Append each line of a file, or of standard input, as a record.",
        "laminar produce flights flights.jsonl --key-from /origin",
    ),
    Command(
        "consume",
        "consume:consume",
        "Print the records of a topic.",
        r"laminar consume flights --last 10 --format '%p %o %k %v\n'",
    ),
    Command(
        "search",
        "find.search:search",
        "Find records by key, trace id, tag, header or content.",
        "laminar search flights --json origin=ORY --limit 10",
    ),
    Command(
        "topic create",
        "topic:create",
        "Create a topic.",
        "laminar topic create flights --partitions 12 --replicas 3 --if-not-exists",
    ),
    Command(
        "topic alter",
        "topic:alter",
        "Change a topic's number of replicas or its settings.",
        "laminar topic alter flights --replicas 3 --setting retention_ms=86400000",
    ),
    Command("topic list", "topic:list_topics", "List topics.", "laminar topic list -o names"),
    Command(
        "topic describe",
        "topic:describe",
        "Show a topic's partitions: leader, replicas, offsets.",
        "laminar topic describe flights",
    ),
    Command(
        "topic trim",
        "topic:trim",
        "Remove the oldest records of a topic.",
        "laminar topic trim flights --before=-7d --dry-run",
    ),
    Command(
        "topic route",
        "admin.route:route",
        "Show which partition holds which keys.",
        "laminar topic route flights",
    ),
    Command(
        "topic split",
        "admin.route:split",
        "Split a partition.",
        "laminar topic split flights 2 --into 3",
    ),
    Command(
        "topic merge",
        "admin.route:merge",
        "Merge partitions that are neighbours by key range.",
        "laminar topic merge flights 2 3",
    ),
    Command(
        "topic move",
        "admin.route:move",
        "Replace a partition by a new one, on other nodes if you like.",
        "laminar topic move flights 2 --avoid n1",
    ),
    Command(
        "topic cancel",
        "admin.route:cancel",
        "Cancel a split, merge or move that is under way.",
        "laminar topic cancel flights",
    ),
    Command(
        "topic reclaim",
        "admin.route:reclaim",
        "Delete a partition that has ended.",
        "laminar topic reclaim flights 2",
    ),
    Command(
        "topic export",
        "backup.topic:export",
        "Back up a topic to a folder; the next run adds what is new.",
        "laminar topic export flights /backups/flights",
    ),
    Command(
        "topic import",
        "backup.topic:import_",
        "Create a topic from a backup, with its offsets and cursors.",
        "laminar topic import /backups/flights --dry-run",
    ),
    Command(
        "topic delete",
        "topic:delete",
        "Delete a topic and all its records.",
        "laminar topic delete flights --yes",
    ),
    Command(
        "cursor list",
        "cursor:list_cursors",
        "Show the cursors of a topic and their lag.",
        "laminar cursor list flights",
    ),
    Command(
        "cursor set",
        "cursor:set_cursor",
        "Move a cursor.",
        "laminar cursor set flights billing --at=-1h",
    ),
    Command(
        "cursor delete",
        "cursor:delete",
        "Delete a cursor.",
        "laminar cursor delete flights billing --yes",
    ),
    Command(
        "channel list",
        "admin.channels:list_channels",
        "Show the channels of a topic and how many records wait in each.",
        "laminar channel list flights",
    ),
    Command(
        "channel create",
        "admin.channels:create",
        "Create a channel.",
        "laminar channel create flights billing --setting order=key --if-not-exists",
    ),
    Command(
        "channel describe",
        "admin.channels:describe",
        "Show the state of a channel in each partition.",
        "laminar channel describe flights billing",
    ),
    Command(
        "channel set",
        "admin.channels:set_channel",
        "Change settings of a channel.",
        "laminar channel set flights billing --setting timeout_ms=60000",
    ),
    Command(
        "channel pause",
        "admin.channels:pause",
        "Stop giving out records of a channel.",
        "laminar channel pause flights billing",
    ),
    Command(
        "channel resume",
        "admin.channels:resume",
        "Give out records of a paused channel again.",
        "laminar channel resume flights billing",
    ),
    Command(
        "channel delete",
        "admin.channels:delete",
        "Delete a channel.",
        "laminar channel delete flights billing --yes",
    ),
    Command(
        "channel receive",
        "admin.jobs:receive",
        "Receive jobs and print them.",
        "laminar channel receive flights billing --max 10 --ack",
    ),
    Command(
        "channel ack",
        "admin.jobs:ack",
        "Acknowledge jobs: they are done.",
        "laminar channel ack flights billing 0:812:5071",
    ),
    Command(
        "channel nack",
        "admin.jobs:nack",
        "Report jobs as failed: they are retried.",
        "laminar channel nack flights billing 0:812:5071 --delay 60 --reason 'no paper'",
    ),
    Command(
        "channel release",
        "admin.jobs:release",
        "Give jobs back without counting the attempt.",
        "laminar channel release flights billing 0:812-830:5071",
    ),
    Command(
        "channel seek",
        "admin.jobs:seek",
        "Move a channel to another position.",
        "laminar channel seek flights billing --at=-1h",
    ),
    Command(
        "channel aside",
        "admin.jobs:aside",
        "List the records that wait for a retry.",
        "laminar channel aside flights billing --key LH400",
    ),
    Command(
        "channel dead",
        "admin.jobs:dead",
        "List dead records, replay or drop them.",
        "laminar channel dead flights billing --replay --all",
    ),
    Command(
        "delayed list",
        "admin.delayed:list_delayed",
        "List the delayed records that are pending.",
        "laminar delayed list flights --to 2030-01-31T12:00:00Z",
    ),
    Command(
        "delayed describe",
        "admin.delayed:describe",
        "Show whether a delayed record is pending, published or cancelled.",
        "laminar delayed describe flights 0.1766398920000.17",
    ),
    Command(
        "delayed cancel",
        "admin.delayed:cancel",
        "Cancel a delayed record.",
        "laminar delayed cancel flights 0.1766398920000.17",
    ),
    Command(
        "delayed move",
        "admin.delayed:move",
        "Give a delayed record another time.",
        "laminar delayed move flights 0.1766398920000.17 --delay 2h",
    ),
    Command(
        "delayed fire",
        "admin.delayed:fire",
        "Publish a delayed record now.",
        "laminar delayed fire flights 0.1766398920000.17",
    ),
    Command(
        "record history",
        "find.history:history",
        "Show the history of a record: deliveries, acknowledgements, retries.",
        "laminar record history flights 2 812",
    ),
    Command(
        "trace show",
        "find.trace:trace",
        "Show what happened to records, and who did it.",
        "laminar trace show --record flights/2/812",
    ),
    Command(
        "trace export",
        "find.trace_export:export",
        "Send the trace as spans to a receiver of OpenTelemetry.",
        "laminar trace export --otlp http://localhost:4318 --follow",
    ),
    Command(
        "sink list",
        "sink:list_sinks",
        "Show sinks and the last batch that each committed.",
        "laminar sink list spark-",
    ),
    Command(
        "sink delete",
        "sink:delete",
        "Delete a sink whose driver is gone for good.",
        "laminar sink delete nightly-load --yes",
    ),
    Command(
        "cluster status",
        "cluster:status",
        "Show the nodes, what is wrong, and what to do.",
        "laminar cluster status --url http://127.0.0.1:7070",
    ),
    Command(
        "cluster doctor",
        "admin.doctor:doctor",
        "Check clocks, disks, ports, programs, catalog and every partition; say what to do.",
        "laminar cluster doctor",
    ),
    Command(
        "doctor",
        "doctor.doctor:doctor",
        "Check this machine and the cluster, and say what to do. --bundle writes a file for support.",
        "laminar doctor --bundle laminar-bundle.tar.gz",
    ),
    Command(
        "group recover",
        "group:recover",
        "Let partitions continue without replicas that never come back.",
        "laminar group recover flights/3 --accept-loss",
    ),
    Command(
        "catalog recover",
        "catalog:recover",
        "Let the cluster's catalog continue when a majority of its voters is gone for good.",
        "laminar catalog recover /var/lib/laminar",
    ),
    Command(
        "node list",
        "admin.node:list_nodes",
        "List the nodes of the cluster.",
        "laminar node list --json",
    ),
    Command(
        "node describe",
        "admin.node:describe",
        "Show a node: weight, zone, what is on it, what its drain waits for.",
        "laminar node describe n1",
    ),
    Command(
        "node drain",
        "admin.node:drain",
        "Empty a node: its leaders and replicas go to other nodes, then it is safe to stop.",
        "laminar node drain n1",
    ),
    Command(
        "node undrain",
        "admin.node:undrain",
        "Let a node hold replicas and lead again.",
        "laminar node undrain n1",
    ),
    Command(
        "node remove",
        "admin.node:remove",
        "Remove a node that is drained and stopped.",
        "laminar node remove n1 --yes",
    ),
    Command(
        "node weight",
        "admin.node:weight",
        "Set a node's weight, in place of the one that it announces.",
        "laminar node weight n1 2",
    ),
    Command(
        "node zone",
        "admin.node:zone",
        "Set a node's zone, in place of the one that it announces.",
        "laminar node zone n1 room-2",
    ),
    Command(
        "partition move",
        "admin.partition:move",
        "Pin a partition to nodes: its replicas move there, and stay.",
        "laminar partition move flights/3 --to n1,n2,n3 --reason 'the disks of n4 are slow'",
    ),
    Command(
        "partition unpin",
        "admin.partition:unpin",
        "Unpin a partition: the cluster chooses its nodes again.",
        "laminar partition unpin flights/3",
    ),
    Command(
        "leader transfer",
        "admin.partition:transfer",
        "Choose the node that leads a partition.",
        "laminar leader transfer flights/3 --to n2",
    ),
    Command(
        "balance",
        "admin.balance:balance",
        "Move one leader or replica to a node with less load, if that helps.",
        "laminar balance --dry-run",
    ),
    Command(
        "operations list",
        "admin.operations:list_operations",
        "List what is under way: drains, growth, pins, moves.",
        "laminar operations list",
    ),
    Command(
        "operations cancel",
        "admin.operations:cancel",
        "Cancel a drain or a pin.",
        "laminar operations cancel drain:n1",
    ),
    Command(
        "log inspect",
        "log:inspect",
        "Show what a folder of logs holds: segments, ranges, journal.",
        "laminar log inspect /var/lib/laminar --json",
    ),
    Command(
        "log verify",
        "log:verify",
        "Read every byte of a folder of logs, and name what is damaged.",
        "laminar log verify /var/lib/laminar",
    ),
    Command(
        "log reindex",
        "log:reindex",
        "Rebuild the index files of a stopped node.",
        "laminar log reindex /var/lib/laminar",
    ),
    Command(
        "system unit",
        "admin.system:unit",
        "Print a systemd unit for a node on this machine.",
        "laminar system unit --data /var/lib/laminar --user laminar",
    ),
    Command(
        "steer status",
        "steer:status",
        "Show the steered ports of this machine, and the number of steered packets.",
        "laminar steer status",
    ),
    Command(
        "steer check",
        "steer:check",
        "Show whether this machine can steer, and what it lacks.",
        "laminar steer check",
    ),
    Command(
        "token create",
        "admin.token:create",
        "Create a token and print it. The cluster keeps no copy.",
        "laminar token create billing --grant write:orders --grant read:orders --expires 90d",
    ),
    Command(
        "token list",
        "admin.token:list_tokens",
        "List tokens: the principal of each and what it may do. Secrets are not shown.",
        "laminar token list",
    ),
    Command(
        "token show",
        "admin.token:show",
        "Show a token: its principal and what it may do.",
        "laminar token show 0123456789abcdef",
    ),
    Command(
        "token revoke",
        "admin.token:revoke",
        "Revoke tokens: requests with them are refused.",
        "laminar token revoke 0123456789abcdef",
    ),
    Command(
        "limit list",
        "admin.limit:list_limits",
        "List the limits of principals; those of * apply to each principal without its own.",
        "laminar limit list",
    ),
    Command(
        "limit show",
        "admin.limit:show",
        "Show the limits of a principal.",
        "laminar limit show billing",
    ),
    Command(
        "limit set",
        "admin.limit:set_limits",
        "Set limits of a principal; limits that are not named stay as they are.",
        "laminar limit set billing requests_per_s=500 topics=20",
    ),
    Command(
        "limit remove",
        "admin.limit:remove",
        "Remove the limits of a principal: those of * apply to it again.",
        "laminar limit remove billing",
    ),
    Command(
        "whoami",
        "admin.token:whoami",
        "Show your principal, its grants and its limits.",
        "laminar whoami",
    ),
    Command(
        "audit",
        "admin.audit:audit",
        "Show what admins did and who was refused.",
        "laminar audit --since 1d --refused",
    ),
    Command(
        "bench produce",
        "bench.bench:produce",
        "Send records in batches to a new topic: rate, latencies, errors, the longest gap.",
        "laminar bench produce load-test --rate 20000 --seconds 30",
    ),
    Command(
        "bench consume",
        "bench.bench:consume",
        "Read a topic from its beginning to its end: rate, waits, the longest gap.",
        "laminar bench consume load-test",
    ),
    Command(
        "bench latency",
        "bench.bench:latency",
        "Append records one by one and read them: the latencies of both.",
        "laminar bench latency load-test-2 --rate 500 --json",
    ),
    Command(
        "pipeline archive",
        "pipeline:archive",
        "Write a topic to Parquet by day, each record once; the next run adds what is new.",
        "laminar pipeline archive flights archive/flights",
    ),
    Command(
        "pipeline replay",
        "pipeline:replay",
        "Write an archive, or a time range of a topic, into another topic: once, each key in order.",
        "laminar pipeline replay flights-again --checkpoint replay-1 --archive archive/flights",
    ),
    Command(
        "pipeline audit",
        "pipeline:audit",
        "Compare what producers say they wrote with what a topic holds: lost, doubled, reordered.",
        "laminar pipeline audit flights claims.jsonl --id header:id",
    ),
    Command(
        "pipeline compare",
        "pipeline:compare",
        "Compare two topics, or the replicas of one: what only one of them has.",
        "laminar pipeline compare flights flights-again --by key",
    ),
    Command(
        "pipeline stats",
        "pipeline_stats:stats",
        "Show what is in a topic: rates over time, sizes, keys, partitions, tags, and how even they are.",
        "laminar pipeline stats flights --plot stats.png",
    ),
    Command(
        "cert ca",
        "admin.cert:ca",
        "Make a CA for a cluster: ca.pem and ca.key.",
        "laminar cert ca --directory certificates",
    ),
    Command(
        "cert node",
        "admin.cert:node",
        "Make a certificate for a node.",
        "laminar cert node n1 --host 10.0.0.1 --host n1.example.net",
    ),
    Command(
        "cert client",
        "admin.cert:client",
        "Make a certificate for a client.",
        "laminar cert client billing",
    ),
    Command("secret draw", "admin.secret:draw", "Print a new secret for a cluster.", "laminar secret draw"),
    Command(
        "secret add",
        "admin.secret:add",
        "Accept a new secret, too: the first step of a change.",
        "laminar secret add /var/lib/laminar/secret new-secret",
    ),
    Command(
        "secret use",
        "admin.secret:use",
        "Use the new secret, and still accept the old one: the second step.",
        "laminar secret use /var/lib/laminar/secret",
    ),
    Command(
        "secret drop",
        "admin.secret:drop",
        "Accept the new secret alone: the last step.",
        "laminar secret drop /var/lib/laminar/secret",
    ),
    Command(
        "context add",
        "context:add",
        "Name a cluster.",
        "laminar context add staging http://127.0.0.1:7070 http://127.0.0.1:7270",
    ),
    Command(
        "context use",
        "context:use",
        "Choose the current context.",
        "laminar context use staging",
    ),
    Command("context list", "context:list_contexts", "List contexts.", "laminar context list"),
    Command(
        "config show",
        "serve:show_config",
        "Show the settings `laminar serve` would run with.",
        "laminar config show --origin",
    ),
)


def _version() -> str:
    from importlib.metadata import version  # a third of the time it takes to start a command

    from laminar.compiled import described

    return f"{version('laminar-mq')} ({described()})"


def build() -> App:
    """Return the whole tree, with no command's module imported."""
    # The options that all commands have come last on a help page.
    groups = Group("Commands", sort_key=1), Group("Parameters", sort_key=1)
    app = App(
        name="laminar",
        help="A replicated log and message queue.",
        version=_version,
        version_flags=["--version"],
        help_epilogue="First steps: `laminar dev`, then in a second terminal "
        "`echo hi | laminar produce hello` and `laminar consume hello -f`. Options such as --url follow the "
        "command: `laminar topic list --url http://n1:7070`.",
        group_commands=groups[0],
        group_parameters=groups[1],
    )
    parents = {}
    for position, family in enumerate(FAMILIES, start=len(COMMANDS)):
        parents[family.name] = App(
            name=family.name, help=family.help, version_flags=[], help_epilogue="", sort_key=position
        )
        app.command(parents[family.name])
    for position, command in enumerate(COMMANDS):
        first, _, name = command.path.rpartition(" ")
        (parents[first] if first else app).command(
            f"laminar.cli.commands.{command.target}",
            name=name,
            help=command.help,
            help_epilogue=f"Example: {command.example}",
            help_format="plaintext",
            version_flags=[],
            sort_key=position,
        )
    return app


app = build()
