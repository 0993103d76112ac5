"""The rules of the code's layout, as tables, and the walk over the source that finds who breaks them.

It reads source and imports nothing, so it also judges trees that were made up for its own test. Every
import counts, at the top of a module or inside a function, for types only or by `import_module("...")`:
what a module names it knows. Apart from `test_architecture.py`, so that it can be run on such a tree.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path

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
    "membership": ("router", "membership.sealing"),
    "ebpf": ("router",),
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
        *("laminar.client.errors", "laminar.client.records", "laminar.client.policy", "laminar.client.net"),
        *("laminar.client.produce", *BELOW_THE_CLIENT),
    ),
    "laminar.client.transact": (
        *(
            "laminar.client.trace_id",
            "laminar.client.errors",
            "laminar.client.records",
            "laminar.client.codecs",
        ),
        *("laminar.client.policy", "laminar.client.net", "laminar.client.produce", *BELOW_THE_CLIENT),
        "laminar.client.consume",
    ),
    "laminar.client.route_changes": (
        *("laminar.client.errors", "laminar.client.records", "laminar.client.net", "laminar.wire"),
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
        *("laminar.client.errors", "laminar.client.records", "laminar.client.codecs"),
        *("laminar.client.policy", "laminar.client.net"),
        *("laminar.client.route_changes", "laminar.client.produce", "laminar.client.consume", "laminar.wire"),
    ),
    "laminar.client.client": (
        *("laminar.client.errors", "laminar.client.records", "laminar.client.codecs", "laminar.client.net"),
        *("laminar.client.produce", "laminar.client.consume", "laminar.client.transact"),
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
        *("laminar.client.errors", "laminar.client.records", "laminar.client.codecs"),
        *("laminar.client.policy", "laminar.client.produce", "laminar.client.consume"),
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
    "laminar.node.catalog": (
        *(
            "laminar.node.access",
            "laminar.node.placement",
            "laminar.node.host",
            "laminar.node.transport",
            "laminar.node.consensus",
            "laminar.node.runtime",
        ),
        *("membership.*", "raft", "router", "laminar.batch", "laminar.http.api", "laminar.log.*"),
        *("laminar.node.routes", "laminar.node.secret"),
    ),
    "laminar.node.channels": (
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.trace"),
        *("laminar.batch", "laminar.wire", "laminar.http.api", "laminar.log.disk"),
    ),
    "laminar.node.delay": (
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.trace"),
        *("laminar.batch", "laminar.wire", "laminar.http.api", "laminar.log.disk"),
    ),
    "laminar.node.find": (
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.consensus"),
        *("laminar.batch", "laminar.http.api", "laminar.log.disk", "laminar.wire", "laminar.node.channels"),
        *("laminar.log.key_index", "laminar.log.segment", "laminar.log.partition_log"),
    ),
    "laminar.node.catch_up": (
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.partition.state"),
        *("raft", "laminar.batch", "laminar.http.api", "laminar.log.*"),
    ),
    "laminar.node.shard": (
        "laminar.node.fair",
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.transactions"),
        *("laminar.node.catalog", "laminar.node.catch_up", "laminar.node.placement"),
        *("membership", "raft", "router"),
        *(
            "laminar.batch",
            "laminar.http.protocol",
            "laminar.http.api",
            "laminar.http.server",
            "laminar.log.*",
        ),
        *("laminar.node.routes", "laminar.node.channels", "laminar.node.delay", "laminar.wire"),
        *("laminar.node.secret", "laminar.node.find", "laminar.node.trace"),
    ),
    "laminar.node.api.common": (
        "laminar.node.fair",
        *("laminar.node.host", "laminar.node.transport", "laminar.node.consensus", "laminar.node.runtime"),
        *("laminar.node.partition", "laminar.node.catalog", "membership"),
        *("laminar.batch", "laminar.wire", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.log.format", "laminar.node.channels", "laminar.node.delay", "laminar.node.trace"),
        *("laminar.node.routes", "laminar.node.access", "laminar.node.secret"),
    ),
    "laminar.node.api.records": (
        "laminar.node.fair",
        *(
            "laminar.node.access",
            "laminar.node.api.common",
            "laminar.node.consensus",
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
            "laminar.node.catalog",
        ),
        *("laminar.node.placement", "membership", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.node.routes", "laminar.node.access", "laminar.node.secret"),
    ),
    "laminar.node.api.cluster": (
        *("laminar.node.api.common", "laminar.node.host", "laminar.node.transport", "laminar.node.consensus"),
        *("laminar.node.runtime", "laminar.node.partition", "laminar.node.catalog"),
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
        *("laminar.node.routes", "laminar.node.catalog", "membership"),
    ),
    "laminar.node.api.channels": (
        *("laminar.node.api.common", "laminar.node.transport", "laminar.log.disk"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.catalog"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api", "membership"),
        *("laminar.node.channels", "laminar.batch", "laminar.node.api.consumers", "laminar.node.access"),
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
        *("laminar.node.find", "laminar.node.trace", "membership", "laminar.batch"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api"),
    ),
    "laminar.node.api.find": (
        "laminar.log.format",
        *("laminar.batch", "laminar.node.api.records"),
        *("laminar.node.api.common", "laminar.node.transport", "laminar.log.disk"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.find"),
        *("laminar.wire", "laminar.http.protocol", "laminar.http.api", "membership"),
    ),
    "laminar.node.api.transactions": (
        *("laminar.node.api.common", "laminar.node.api.records", "laminar.node.transport"),
        *("laminar.node.partition", "laminar.node.partition.state", "laminar.node.transactions"),
        *("laminar.batch", "laminar.wire", "laminar.http.protocol", "laminar.http.api"),
        *("laminar.node.routes", "laminar.node.channels", "laminar.node.access"),
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
        *("laminar.node.transactions", "laminar.http.protocol", "laminar.http.api"),
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
    "laminar.testing": ("laminar", "laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.cli": ("laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.cli.commands": (
        *("laminar.cli", "laminar", "laminar.client.*", "laminar.spark.*", "laminar.testing"),
        *("laminar.node.*", "laminar.log.*", "router", "ebpf", *BELOW_THE_CLIENT),
    ),
    "laminar.cli.commands.backup": ("laminar.cli", "laminar.client.*", *BELOW_THE_CLIENT),
    "laminar.cli.commands.find": ("laminar.cli", "laminar.client.*", "laminar.otel", *BELOW_THE_CLIENT),
    "laminar.cli.commands.doctor": (
        *("laminar.cli", "laminar.cli.commands", "laminar.cli.commands.admin", "laminar.client.*"),
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
    "membership.swim",
    "membership.records",
    "membership.requests",
    "membership.catalog_rules",
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
    "laminar.node.api.transactions.sinks": "`_transactions`, whose partitions never change",
}
MAY_COUNT_PARTITIONS = {
    "laminar.wire.key_route": "makes route 0",
    "membership.route_rules": "makes route 0, as a record has it",
    "membership.records": "lists the partitions of a topic that never changed",
    "laminar.node.catalog.service": "makes the partitions of a new topic",
}

COUNTS = frozenset(("partitions", "partition_count", "places", "numbers", "queues"))


@dataclass(frozen=True, order=True)
class Violation:
    """One place that breaks one rule; its text is what a person reads in the failing test."""

    place: str
    rule: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}"


@dataclass(frozen=True)
class Module:
    """One source file of the house, parsed."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def imports_and_calls(self) -> list[ast.Import | ast.ImportFrom | ast.Call]:
        """What may name another module, wherever it stands."""
        wanted = ast.Import, ast.ImportFrom, ast.Call
        return [node for node in ast.walk(self.tree) if isinstance(node, wanted)]


def modules(root: Path) -> dict[str, Module]:
    """Every module of the house below `root`, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            name = ".".join(parts)
            found[name] = _parsed(name, path, path.read_text("utf-8"))
    return found


@cache  # each check looks at all modules again
def _parsed(name: str, path: Path, text: str) -> Module:
    return Module(name, path, ast.parse(text, str(path)))


def imports(module: Module, known: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; `from a import b` is `a.b` where that is a module, else `a`."""
    for node in module.imports_and_calls:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                if level:
                    parts = module.name.split(".")
                    base = parts[: len(parts) - level + module.is_package]
                    source = ".".join([*base, source] if source else base)
                assert source is not None, f"{module.name}:{node.lineno}: an import without a module"
                for alias in names:
                    if alias.name == "__version__":
                        continue  # a fact about the distribution; who names it depends on nothing
                    inner = f"{source}.{alias.name}"
                    yield node.lineno, inner if inner in known or inner in MAY_IMPORT else source
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if dotted(function).rsplit(".", 1)[-1] in ("import_module", "__import__"):
                    yield node.lineno, name


def row_of(name: str) -> str | None:
    """The key of MAY_IMPORT that a module of ours belongs to: its folder, or itself in a joining package.

    None for a module of others, and for one that no row covers.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        row = ".".join(parts[:length])
        if row in MAY_IMPORT:
            return None if row in JOINING and length < len(parts) else row
    return None


def covers(entries: Iterable[str], row: str) -> bool:
    """Whether one of `entries` is `row`, or `x.*` with x being `row` or a package above it."""
    return any(
        row == entry or (entry.endswith(".*") and f"{row}.".startswith(entry[:-1])) for entry in entries
    )


def tolerated(name: str, target: str) -> tuple[str, str] | None:
    """The entry of TOLERATED that lets `name` import `target`; None where none does."""
    for source, into in TOLERATED:
        if fnmatch(name, f"laminar.{source}") and fnmatch(target, f"laminar.{into}"):
            return source, into
    return None


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else f".{node.attr}"
    return ""


def check_directions(root: Path) -> list[Violation]:
    """Imports run one way: a folder imports itself and what its row of MAY_IMPORT names."""
    known = modules(root)
    wrong: list[Violation] = []
    for name, module in known.items():
        row = row_of(name)
        if row is None:
            wrong.append(Violation(name, "belongs to no row of MAY_IMPORT in tests/architecture.py"))
            continue
        for line, target in imports(module, known):
            if target.split(".")[0] not in PACKAGES:
                continue
            other = row_of(target)
            for_all = FOR_ALL if row.startswith("laminar") else ()
            allowed = other == row or (other is not None and covers((*MAY_IMPORT[row], *for_all), other))
            if not allowed and tolerated(name, target) is None:
                wrong.append(Violation(f"{name}:{line}", f"{row} may not import {target}"))
    return wrong


def graph(root: Path) -> dict[str, set[str]]:
    """Each module of ours, and those of ours that it imports; without what is tolerated."""
    known = modules(root)
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, module in known.items():
        for _, target in imports(module, known):
            there = target if target in known else target.rpartition(".")[0]
            if there in known and there != name and tolerated(name, there) is None:
                found[name].add(there)
    return found


def circles(found: dict[str, set[str]]) -> list[list[str]]:
    """Sets of names of which each leads to every other (Tarjan's algorithm), the largest first."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    result = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        path.append(name)
        for other in sorted(found.get(name, ())):
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            place = path.index(name)
            circle = path[place:]
            del path[place:]
            if len(circle) > 1:
                result.append(sorted(circle))

    for name in sorted(found):
        if name not in numbers:
            visit(name)
    return sorted(result, key=len, reverse=True)


def check_circles(root: Path) -> list[Violation]:
    """No import comes back to where it began, by way of modules or of folders; imports for types count."""
    between_modules = graph(root)
    between_rows: dict[str, set[str]] = defaultdict(set)
    for name, targets in between_modules.items():
        row = row_of(name)
        for target in targets:
            other = row_of(target)
            if row is not None and other is not None and row != other:
                between_rows[row].add(other)
    wrong = []
    for kind, found in (("modules", between_modules), ("folders", between_rows)):
        wrong += [Violation(each[0], f"is in a circle of {kind}: {each}") for each in circles(found)]
    return wrong


def sizes(root: Path) -> dict[str, int]:
    """How many modules each folder holds, its `__init__` aside."""
    found: dict[str, int] = defaultdict(int)
    for module in modules(root).values():
        if not module.is_package:
            found[module.path.parent.relative_to(root).as_posix()] += 1
    return dict(found)


def check_numbers(root: Path) -> list[Violation]:
    """Numbers of partitions are listed by the topic's record or route: nothing counts them from 0."""
    wrong = []
    for name, module in modules(root).items():
        for node in module.imports_and_calls:
            if not isinstance(node, ast.Call):
                continue
            called = dotted(node.func)
            if called.endswith("Route.even") and name not in MAY_TAKE_ROUTE_0:
                wrong.append(Violation(f"{name}:{node.lineno}", "takes the topic's route for route 0"))
            counts = {
                dotted(inner).rsplit(".", 1)[-1].lstrip("_")
                for argument in node.args
                for inner in ast.walk(argument)
                if isinstance(inner, ast.Name | ast.Attribute)
            }
            if called == "range" and counts & COUNTS and name not in MAY_COUNT_PARTITIONS:
                wrong.append(
                    Violation(f"{name}:{node.lineno}", "counts partitions, and takes that for numbers")
                )
    return wrong


def check_sizes(root: Path) -> list[Violation]:
    """No folder holds more modules than a reader takes in at a glance."""
    return [
        Violation(folder, f"holds {count} modules; the most is {MOST_MODULES}")
        for folder, count in sizes(root).items()
        if count > MOST_MODULES and folder not in CROWDED
    ]


def not_needed(root: Path) -> list[str]:
    """Entries of TOLERATED and CROWDED that nothing in the tree needs any more."""
    known = modules(root)
    used = {tolerated(name, target) for name, module in known.items() for _, target in imports(module, known)}
    found = [f"{source} -> {target}" for source, target in TOLERATED if (source, target) not in used]
    counts = sizes(root)
    return found + [folder for folder in CROWDED if counts.get(folder, 0) <= MOST_MODULES]


def check_generic_names(root: Path) -> list[Violation]:
    """From what a user's program imports, no path of imports leads to one of the four generic names.

    But for a door that is opened on purpose (`ASKED_FOR`).
    """
    known = modules(root)
    wrong = []
    targets = {name: {target for _, target in imports(module, known)} for name, module in known.items()}
    for start in (name for name in known if covers(USERS, row_of(name) or "")):
        came_from = {start: ""}
        queue = [start]
        while queue:
            here = queue.pop()
            for target in sorted(targets[here]):
                if target.split(".")[0] in GENERIC:
                    wrong.append(Violation(start, f"leads to {target} through {here}"))
                elif target in known and target not in came_from and target not in ASKED_FOR:
                    came_from[target] = here
                    queue.append(target)
    return wrong


def check_purity(root: Path) -> list[Violation]:
    """A pure module has no clock, no chance, no I/O: they come in by argument."""
    known = modules(root)
    wrong = []
    for name, module in known.items():
        if not any(fnmatch(name, pattern) for pattern in PURE):
            continue
        for line, target in imports(module, known):
            if target.split(".")[0] in IMPURE:
                wrong.append(Violation(f"{name}:{line}", f"is pure, and may not import {target}"))
        for node in ast.walk(module.tree):
            match node:
                case ast.ImportFrom(module="random", names=names) if any(n.name != "Random" for n in names):
                    wrong.append(Violation(f"{name}:{node.lineno}", "takes its randomness as random.Random"))
                case ast.Attribute(value=ast.Name(id="random"), attr=attr) if attr != "Random":
                    wrong.append(Violation(f"{name}:{node.lineno}", f"is pure: no random.{attr}"))
                case ast.Attribute(attr="now" | "utcnow" | "today"):
                    wrong.append(Violation(f"{name}:{node.lineno}", "is pure, and may not read a clock"))
                case ast.Call(func=ast.Name(id="open" | "print" | "input" as function)):
                    wrong.append(Violation(f"{name}:{node.lineno}", f"is pure, and may not call {function}"))
    return wrong


def check_disk_door(root: Path) -> list[Violation]:
    """In packages that hold data only the disk interface touches files."""
    known = modules(root)
    wrong = []
    for name, module in known.items():
        if name in MAY_OPEN or not any(f"{name}.".startswith(f"{package}.") for package in HOLDS_DATA):
            continue
        short = aliases(module)
        for line, target in imports(module, known):
            if target.split(".")[0] in FILE_MODULES:
                wrong.append(Violation(f"{name}:{line}", f"touches files by {target}: go through the disk"))
        for node in module.imports_and_calls:
            if isinstance(node, ast.Call) and (call := file_call(node, short)):
                wrong.append(Violation(f"{name}:{node.lineno}", f"calls {call}: go through the disk"))
    return wrong


def aliases(module: Module) -> dict[str, str]:
    """Local name to full name, for `import os as o` and `from os import rename as r`."""
    short: dict[str, str] = {}
    for node in module.imports_and_calls:
        match node:
            case ast.Import(names=names):
                short |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(source), names=names, level=0):
                short |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in names}
    return short


def file_call(call: ast.Call, short: dict[str, str]) -> str | None:
    """The full name of what `call` calls, if that touches a file."""
    name = dotted(call.func)
    first, _, rest = name.partition(".")
    full = ".".join(filter(None, (short.get(first, first), rest)))
    if full == "mmap.mmap" and call.args and ast.unparse(call.args[0]) == "-1":
        return None  # memory shared between processes, no file
    if full in FILE_CALLS:
        return full
    if isinstance(call.func, ast.Attribute) and call.func.attr in FILE_METHODS:
        return f"a path's .{call.func.attr}"
    return None
