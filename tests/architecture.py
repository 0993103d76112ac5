"""The rules of the code's layout, as tables: who may import whom, what is pure, who opens files.

`layout_checks.py` reads the source against them, in `test_architecture.py`.
"""

from __future__ import annotations

PACKAGES = ("laminar", "raft", "membership", "router", "ebpf")

# Generic names: in a user's program another `router.py` may stand before ours, so it may need none of these.
GENERIC = ("raft", "membership", "router", "ebpf")

# Packages whose own modules each have a row below: they join the folders beside them, or are used by all.
JOINING = ("laminar", "laminar.http", "laminar.log", "laminar.client", "laminar.node")

# What every module of `laminar` may import: it only computes, and imports nothing of ours.
FOR_ALL = ("laminar.checksum", "laminar.compiled", "laminar.histogram", "laminar.unzeroed")

BELOW_THE_CLIENT = ("laminar.batch.*", "laminar.wire", "laminar.http.*")

# A folder, or a module of a joining package: what it may import beside itself. `x.*` is package x with all
# below it, any other entry that folder or module alone. Within a package the lowest row stands first.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "raft": (),
    "router": (),
    "membership.sealing": (),
    "membership.gossip": ("membership.sealing",),
    "membership": (),
    "ebpf": (),
    "laminar.checksum": (),
    "laminar.histogram": (),
    "laminar.compiled": (),
    "laminar.unzeroed": (),
    # One batch, and what client and node compute alike.
    "laminar.batch": (),
    "laminar.batch.arrow": ("laminar.batch",),
    "laminar.wire": ("laminar.batch",),
    # HTTP
    "laminar.http": (),
    "laminar.http.protocol": (),
    "laminar.http.client": ("laminar.http.protocol",),
    # With `documents`, whose members have the limits of the parameters.
    "laminar.http.api": ("laminar.http.protocol", "laminar.batch.*", "laminar.wire"),
    "laminar.http.server": ("laminar.http.protocol",),
    "laminar.console": (),
    # The log
    "laminar.log.disk": (),
    "laminar.log.format": ("laminar.log.disk", "laminar.batch"),
    "laminar.log.key_index": ("laminar.log.disk",),
    "laminar.log.segment": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.key_index", "laminar.batch"),
    ),
    "laminar.log.partition_log": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.segment"),
        "laminar.batch",
    ),
    "laminar.log.commit": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.segment", "laminar.log.partition_log"),
    ),
    "laminar.log.integrity": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.segment", "laminar.log.partition_log"),
        "laminar.batch",
    ),
    "laminar.log.recovery": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.segment", "laminar.log.partition_log"),
        *("laminar.log.commit", "laminar.batch"),
    ),
    "laminar.log.storage": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.segment", "laminar.log.partition_log"),
        *("laminar.log.commit", "laminar.log.integrity", "laminar.log.recovery"),
    ),
    "laminar.log.library": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.partition_log", "laminar.log.storage"),
        "laminar.batch.*",
    ),
    "laminar.log.tools": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.segment", "laminar.log.commit"),
        *("laminar.log.recovery", "laminar.log.library", "laminar.batch", "laminar.log.key_index"),
    ),
    "laminar.log": (
        *("laminar.log.disk", "laminar.log.format", "laminar.log.partition_log", "laminar.log.recovery"),
        *("laminar.log.storage", "laminar.log.library"),
    ),
    # The client
    "laminar.client": (),
    "laminar.client.errors": ("laminar.http.api", "laminar.http.protocol"),
    "laminar.client.records": ("laminar.client.errors", "laminar.batch.*"),
    "laminar.client.descriptions": (),
    "laminar.client.codecs": (),
    "laminar.client.trace_id": ("laminar.client.errors",),
    "laminar.client.policy": ("laminar.client.errors", "laminar.client.records", "laminar.wire"),
    "laminar.client.net": (
        *("laminar.client.errors", "laminar.client.policy"),
        *("laminar.batch", "laminar.http.protocol", "laminar.http.client", "laminar.http.api"),
    ),
    "laminar.client.produce": (
        *(
            "laminar.client.delivery_time",
            "laminar.client.trace_id",
            "laminar.client.errors",
            "laminar.client.records",
            "laminar.client.codecs",
        ),
        *("laminar.client.policy", "laminar.client.net", *BELOW_THE_CLIENT),
    ),
    "laminar.client.consume": (
        *(
            "laminar.client.errors",
            "laminar.client.records",
            "laminar.client.descriptions",
            "laminar.client.policy",
            "laminar.client.net",
        ),
        *("laminar.client.produce", *BELOW_THE_CLIENT),
    ),
    "laminar.client.consume.group": (
        *("laminar.client.errors", "laminar.client.records", "laminar.client.policy", "laminar.client.net"),
        "laminar.client.consume",
    ),
    "laminar.client.transact": (
        *(
            "laminar.client.trace_id",
            "laminar.client.errors",
            "laminar.client.records",
            "laminar.client.descriptions",
            "laminar.client.codecs",
        ),
        *("laminar.client.policy", "laminar.client.net", "laminar.client.produce", *BELOW_THE_CLIENT),
        "laminar.client.consume",
    ),
    "laminar.client.route_changes": (
        *("laminar.client.errors", "laminar.client.descriptions", "laminar.client.net", "laminar.wire"),
    ),
    "laminar.client.delivery_time": ("laminar.client.errors", "laminar.wire"),
    "laminar.client.delayed": (
        "laminar.client.delivery_time",
        "laminar.client.errors",
        "laminar.client.net",
    ),
    "laminar.client.backup": (
        *("laminar.client.errors", "laminar.client.net", "laminar.client.produce", "laminar.client.consume"),
        *("laminar.client.policy", "laminar.client.route_changes", "laminar.batch", "laminar.http.api"),
        "laminar.batch.arrow",
    ),
    "laminar.client.search": (
        *("laminar.client.trace_id", "laminar.client.delivery_time"),
        *("laminar.client.errors", "laminar.client.net"),
    ),
    "laminar.client.trace": ("laminar.client.errors", "laminar.client.net"),
    "laminar.client.history": ("laminar.client.net", "laminar.client.search"),
    "laminar.client.topic": (
        "laminar.client.history",
        *(
            "laminar.client.search",
            "laminar.client.trace_id",
            "laminar.client.delivery_time",
            "laminar.client.delayed",
        ),
        *(
            "laminar.client.errors",
            "laminar.client.records",
            "laminar.client.descriptions",
            "laminar.client.codecs",
        ),
        *("laminar.client.policy", "laminar.client.net"),
        *("laminar.client.route_changes", "laminar.client.produce", "laminar.client.consume", "laminar.wire"),
        "laminar.client.consume.group",
    ),
    "laminar.client.client": (
        *(
            "laminar.client.errors",
            "laminar.client.descriptions",
            "laminar.client.codecs",
            "laminar.client.net",
        ),
        *("laminar.client.produce", "laminar.client.transact"),
        *("laminar.client.topic", "laminar.client.trace", "laminar.http.api", "laminar.http.protocol"),
    ),
    "laminar.client.sync": (
        *("laminar.client.history", "laminar.client.trace"),
        *(
            "laminar.client.search",
            "laminar.client.trace_id",
            "laminar.client.delivery_time",
            "laminar.client.delayed",
        ),
        *(
            "laminar.client.errors",
            "laminar.client.records",
            "laminar.client.descriptions",
            "laminar.client.codecs",
        ),
        *("laminar.client.policy", "laminar.client.produce", "laminar.client.consume"),
        "laminar.client.consume.group",
        *("laminar.client.transact", "laminar.client.topic", "laminar.client.client"),
        *("laminar.http.api", "laminar.http.protocol"),
    ),
    # The node
    "laminar.node": (),
    "laminar.node.secret": (),
    "laminar.node.host": ("laminar.log.*", "laminar.http.api", "laminar.node.secret"),
    "laminar.node.fair": ("laminar.log.disk",),
    "laminar.node.transport": ("laminar.node.host", "laminar.node.secret"),
    "laminar.node.consensus": (
        *("laminar.node.host", "laminar.node.transport"),
        *("raft", "laminar.batch", "laminar.log.*"),
    ),
    "laminar.node.runtime": (
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.secret"),
        *(*GENERIC, "laminar.batch", "laminar.http.protocol", "laminar.http.client", "laminar.log.*"),
        "membership.gossip",
    ),
    "laminar.node.partition.state": (
        *("laminar.node.consensus", "laminar.batch", "laminar.http.api"),
        "laminar.wire",
    ),
    "laminar.node.trace": (
        *("laminar.node.partition.state", "laminar.batch", "laminar.http.api", "laminar.wire"),
    ),
    "laminar.node.partition": (
        *("laminar.node.host", "laminar.node.consensus", "laminar.node.partition.state"),
        "laminar.node.trace",
        *("raft", "laminar.batch", "laminar.http.api", "laminar.log.*", "laminar.wire"),
    ),
    "laminar.node.transactions": (
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.batch", "laminar.http.api"),
    ),
    "laminar.node.placement": ("membership", "router"),
    "laminar.node.routes": (
        *("laminar.node.host", "laminar.node.transport", "laminar.node.runtime"),
        *("membership", "laminar.batch", "laminar.wire"),
    ),
    "laminar.node.access": (
        *("laminar.node.host", "laminar.node.runtime", "laminar.node.secret", "membership"),
        *("laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.catalog.messages": ("laminar.node.placement", "laminar.node.routes", "membership"),
    "laminar.node.catalog": (
        "laminar.node.catalog.messages",
        *(
            "laminar.node.access",
            "laminar.node.placement",
            "laminar.node.host",
            "laminar.node.transport",
            "laminar.node.consensus",
            "laminar.node.runtime",
        ),
        *("membership.*", "raft", "router", "laminar.batch", "laminar.log.*"),
        *("laminar.node.routes", "laminar.node.secret"),
    ),
    "laminar.node.channels.open_records": (
        *("laminar.node.partition", "laminar.node.partition.state"),
        *("laminar.batch", "laminar.http.api", "laminar.log.disk"),
    ),
    "laminar.node.channels": (
        "laminar.node.channels.open_records",
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.trace"),
        *("laminar.batch", "laminar.wire", "laminar.http.api", "laminar.log.disk"),
    ),
    "laminar.node.delay": (
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.trace"),
        *("laminar.batch", "laminar.wire", "laminar.http.api", "laminar.log.disk"),
    ),
    "laminar.node.find": (
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.consensus"),
        *("laminar.batch", "laminar.http.api", "laminar.log.disk", "laminar.wire"),
        *("laminar.log.key_index", "laminar.log.segment"),
    ),
    "laminar.node.catch_up": (
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.partition.state"),
        *("raft", "laminar.batch", "laminar.http.api", "laminar.log.*"),
    ),
    "laminar.node.shard.replicas": (
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.trace"),
        *("laminar.node.catalog.messages", "laminar.node.catch_up", "membership", "raft", "router"),
        *("laminar.batch", "laminar.http.api", "laminar.log.*"),
    ),
    "laminar.node.shard": (
        "laminar.node.shard.replicas",
        "laminar.node.fair",
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.transactions"),
        *("laminar.node.catalog.messages", "laminar.node.catch_up", "laminar.node.placement"),
        *("membership", "router"),
        *("laminar.http.protocol", "laminar.http.api", "laminar.http.server", "laminar.log.*"),
        *("laminar.node.routes", "laminar.node.channels", "laminar.node.delay", "laminar.wire"),
        *("laminar.node.secret", "laminar.node.find", "laminar.node.trace"),
    ),
    "laminar.node.api.common": (
        "laminar.node.fair",
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.catalog.messages", "membership"),
        *("laminar.batch", "laminar.wire", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.log.format", "laminar.node.channels", "laminar.node.delay", "laminar.node.trace"),
        *("laminar.node.access", "laminar.node.secret"),
    ),
    "laminar.node.api.records": (
        "laminar.node.fair",
        *(
            "laminar.node.access",
            "laminar.node.api.common",
            "laminar.node.transport",
            "membership",
        ),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.transactions"),
        *("laminar.batch", "laminar.wire", "laminar.http.protocol", "laminar.http.api", "laminar.log.disk"),
        *("laminar.node.routes", "laminar.node.access", "laminar.node.host", "laminar.node.secret"),
        "laminar.node.trace",
    ),
    "laminar.node.api.admin": (
        *(
            "laminar.node.api.common",
            "laminar.node.transport",
            "laminar.node.runtime",
            "laminar.node.catalog.messages",
        ),
        *("laminar.node.placement", "membership", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.node.access", "laminar.node.secret"),
    ),
    "laminar.node.api.cluster": (
        *("laminar.node.api.common", "laminar.node.host", "laminar.node.transport", "laminar.node.consensus"),
        *("laminar.node.runtime", "laminar.node.partition", "laminar.node.catalog.messages"),
        *("laminar.node.transactions", "laminar.node.placement", "membership", "raft"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.node.routes", "laminar.node.access", "laminar.console"),
    ),
    "laminar.node.api.metrics": (
        *("laminar.node.api.common", "laminar.node.api.cluster", "laminar.node.runtime"),
        *("laminar.node.transport", "laminar.node.partition", "laminar.node.host"),
        *("laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.api.health": (
        *("laminar.node.access", "laminar.node.api.common", "laminar.node.api.admin"),
        *("laminar.node.api.cluster", "laminar.node.runtime", "laminar.node.transport"),
        *("laminar.node.partition", "laminar.node.transactions", "membership"),
        *("laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.api.bundle": (
        *("laminar.node.api.common", "laminar.node.api.health", "laminar.node.api.metrics"),
        *("laminar.node.host", "laminar.node.runtime", "laminar.node.transport", "laminar.node.partition"),
        *("membership", "laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.api.consumers": (
        *("laminar.node.access", "laminar.node.api.common", "laminar.node.transport"),
        *("laminar.node.partition", "laminar.node.partition.state"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.node.routes", "laminar.node.catalog.messages", "membership"),
    ),
    "laminar.node.api.channels": (
        *("laminar.node.api.common", "laminar.node.transport", "laminar.log.disk"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.catalog.messages"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api", "membership"),
        *("laminar.node.channels", "laminar.batch", "laminar.node.api.consumers", "laminar.node.access"),
        "laminar.node.channels.open_records",
        "laminar.node.trace",
    ),
    "laminar.node.api.delayed": (
        *("laminar.node.api.common", "laminar.node.transport", "laminar.log.disk"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.delay"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api", "membership"),
        *("laminar.node.routes", "laminar.node.trace"),
    ),
    "laminar.node.api.trace": (
        *("laminar.node.access", "laminar.node.api.common", "laminar.node.api.find", "laminar.node.host"),
        *("laminar.node.find", "laminar.node.trace"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.api.find": (
        "laminar.log.format",
        *("laminar.batch", "laminar.node.api.records"),
        *("laminar.node.api.common", "laminar.node.transport", "laminar.log.disk"),
        *("laminar.node.partition", "laminar.node.find"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api", "membership"),
    ),
    "laminar.node.api.transactions": (
        *("laminar.node.api.common", "laminar.node.api.records", "laminar.node.transport"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.transactions"),
        *("laminar.batch", "laminar.wire", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.node.channels", "laminar.node.access"),
    ),
    "laminar.node.api.audit": (
        *("laminar.node.api.common", "laminar.node.access", "laminar.node.host"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.api": (
        *(
            "laminar.node.api.*",
            "laminar.node.access",
            "laminar.node.host",
            "laminar.node.transport",
            "laminar.node.runtime",
        ),
        *("laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.assembly": (
        *("laminar.node.runtime", "laminar.node.catalog", "laminar.node.shard", "laminar.node.api"),
        "laminar.log.*",
    ),
    "laminar.node.entry_points": (
        *("laminar.node.host", "laminar.node.runtime", "laminar.node.catalog", "laminar.node.assembly"),
        *("router", "laminar.log.*", "laminar.console"),
    ),
    "laminar.node.supervisor": (
        *("laminar.node.host", "laminar.node.runtime", "laminar.node.entry_points", "laminar.log.*"),
        *("laminar.node.access", "laminar.node.secret"),
    ),
    "laminar.node.start": (
        *("laminar.node.host", "laminar.node.runtime", "laminar.node.entry_points", "laminar.log.*"),
        *("laminar.node.access", "laminar.node.supervisor"),
    ),
    "laminar.node.__main__": ("laminar.node.host", "laminar.node.start"),
    # What is imported by name. `laminar` is what `import laminar` shows, not all that is inside.
    "laminar.aio": ("laminar.client.*",),
    "laminar.embedded": ("laminar.client.*", "laminar.node.*", "laminar.log.*"),
    "laminar.outbox": ("laminar.client.*",),
    "laminar.once": ("laminar.client.*", "laminar.outbox"),
    # It names its version as the scope of its spans.
    "laminar.otel": ("laminar.client.*", "laminar.wire"),
    "laminar": (
        *("laminar.aio", "laminar.client.*", "laminar.log.*", "laminar.testing", "laminar.embedded"),
        *("laminar.outbox", "laminar.once", "laminar.otel"),
    ),
    "laminar.spark.read": ("laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.spark.write": ("laminar.spark.read", "laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.spark": ("laminar.spark.read", "laminar.spark.write"),
    "laminar.spark.pipelines": (
        *("laminar.spark", "laminar.spark.read", "laminar.spark.write"),
        *("laminar.client.*", *BELOW_THE_CLIENT),
    ),
    "laminar.testing": ("laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.cli": ("laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.cli.commands": (
        *("laminar.cli", "laminar", "laminar.client.*", "laminar.spark.*", "laminar.testing"),
        *("laminar.node.*", "laminar.log.*", "ebpf", *BELOW_THE_CLIENT),
    ),
    "laminar.cli.commands.backup": ("laminar.cli", "laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.cli.commands.find": ("laminar.cli", "laminar.client.*", "laminar.otel", *BELOW_THE_CLIENT),
    "laminar.cli.commands.doctor": (
        *("laminar.cli", "laminar.cli.commands.admin", "laminar.client.*"),
        # The settings of this machine, and which of them may be shown.
        *("laminar.node.host", "laminar.node.api.bundle", *BELOW_THE_CLIENT),
    ),
    "laminar.cli.commands.bench": (
        *("laminar.cli", "laminar.cli.commands", "laminar.client.*", *BELOW_THE_CLIENT),
    ),
    "laminar.cli.commands.admin": (
        *("laminar.cli", "laminar.cli.commands", "laminar.client.*", *BELOW_THE_CLIENT),
        # The rules of a node's name, how a certificate names it, and the file of the nodes' secrets.
        *("laminar.node.host", "laminar.node.secret"),
    ),
}

# Imports against the rules above, or that close a circle: who, whom (below `laminar`), why it is still so.
# Each is to go, and one that is gone must go from here as well.
TOLERATED: dict[tuple[str, str], str] = {}

# More modules than this in one folder and a reader searches instead of reading.
MOST_MODULES = 15
CROWDED: dict[str, str] = {}

# A whole node in a user's program, imported when `laminar.embed` asks for it, never before. It looks
# first whether the four generic names are ours, so the walk from what a user imports ends there.
ASKED_FOR = ("laminar.embedded",)

# What a user's own program imports.
USERS = (
    *("laminar", "laminar.aio", "laminar.client.*", "laminar.log.*", "laminar.spark.*", "laminar.testing"),
    *("laminar.outbox", "laminar.once", "laminar.otel"),
    *BELOW_THE_CLIENT,
)

PURE = (
    "raft.*",
    "raft",
    "router.*",
    "router",
    "membership.sealing.bound",
    "membership.gossip.swim",
    "membership.records",
    "membership.requests",
    "membership.catalog_rules",
    "membership.changes",
    "membership.channel_rules",
    "membership.credential_rules",
    "membership.limit_rules",
    "membership.replica_rules",
    "membership.placement_rules",
    "membership.route_rules",
    "membership.catalog_delta",
    "laminar.node.placement.balance",
    "laminar.node.placement.load",
    "laminar.checksum",
    "laminar.histogram",
    "laminar.batch",
    "laminar.batch.batch",
    "laminar.batch.builder",
    "laminar.batch.columns",
    "laminar.batch.header",
    "laminar.batch.large_record",
    "laminar.batch.single_value",
    "laminar.batch.validation",
    "laminar.batch.arrow.flatbuffers",
    "laminar.batch.arrow.ipc_reader",
    "laminar.batch.arrow.ipc_writer",
    "laminar.wire.*",
    "laminar.client.policy.*",
    "laminar.log.format.index_entry",
    "laminar.log.format.journal_codec",
    "laminar.log.recovery.replay",
)
IMPURE = frozenset(
    "asyncio socket time os threading subprocess selectors select signal ssl multiprocessing concurrent"
    " uvloop aiofiles tempfile shutil pathlib mmap fcntl ctypes secrets uuid logging io http urllib".split()
)

# Packages that hold data: bytes reach a disk through the disk interface alone, so a test can take its place.
HOLDS_DATA = ("laminar.log", "laminar.node", "membership", "raft", "router")
# The door, and the modules that read what is not data, each with the reason.
MAY_OPEN = {
    "laminar.log.disk.disk": "the door",
    "laminar.node.host.sealed_files": "sealed segments, read only, for a replica that verifies every batch",
    "laminar.node.host.settings_sources": "a person's TOML file: not data",
    "laminar.node.host.machine": "the cgroup's limits: not data",
    "laminar.node.secret.keyring": "the file of the nodes' secrets, read only: not data",
    "laminar.node.access.private_files": "first token and drawn secret: not data, for one user only",
    "laminar.node.host.log_setup": "standard error, opened once more so that a full pipe can't stop the loop",
}
FILE_CALLS = frozenset(
    "open io.open io.FileIO codecs.open aiofiles.open mmap.mmap fcntl.flock"
    " os.open os.rename os.replace os.unlink os.remove os.mkdir os.makedirs os.rmdir os.removedirs"
    " os.truncate os.ftruncate os.fsync os.fdatasync os.sync os.pread os.preadv os.pwrite os.pwritev"
    " os.listdir os.scandir os.walk os.link os.symlink os.posix_fallocate".split()
)
FILE_MODULES = ("shutil", "tempfile", "sqlite3", "shelve", "dbm")
FILE_METHODS = ("read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkdir")

# The numbers of a topic's partitions have gaps once its route has changed: they are listed, never counted.
# Who may compute route 0 from a number of partitions, and who may count up to one, each with the reason.
MAY_TAKE_ROUTE_0 = {
    "laminar.wire.key_route": "places of groups and blocks, which follow from the topic's creation",
    "laminar.client.policy.routing": "an answer that says route 0",
    "laminar.client.produce.datagrams": "a program that gives the number of partitions asks no node",
    "laminar.node.api.common.topic_lookup": "a record without another route",
    "laminar.node.api.transactions.steps": "`_transactions`, whose partitions never change",
}
MAY_COUNT_PARTITIONS = {
    "laminar.wire.key_route": "makes route 0",
    "membership.route_rules": "makes route 0, as a record has it",
    "membership.records": "lists the partitions of a topic that never changed",
    "laminar.node.catalog.service": "makes the partitions of a new topic",
}

COUNTS = frozenset(("partitions", "partition_count", "places", "numbers", "queues"))
