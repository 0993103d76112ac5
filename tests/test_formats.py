"""What programs of two versions exchange or store: no field of it changes unnoticed (docs/upgrading.md).

`golden/formats.json` has the fields of every such struct, in order, with the code version at which each came,
and the values of what is compared as text. After an addition run `python -m tests.test_formats`: it adds what
is new, with this program's code version, and refuses everything else.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from laminar.batch.header import Kind
from laminar.node.transport.link import FrameKind
from membership.catalog import CODE_VERSION
from membership.requests import Outcome

GOLDEN = Path(__file__).parent / "golden" / "formats.json"
MODULES = (
    "laminar.log.format.checkpoint_state",
    "laminar.log.format.manifest",
    "laminar.log.recovery.node",
    "laminar.node.api.channels.states",
    "laminar.node.api.cluster.accept_loss",
    "laminar.node.api.cluster.replica_status",
    "laminar.node.api.common.forwarding",
    "laminar.node.api.common.leader_lookup",
    "laminar.node.api.consumers.cursor_places",
    "laminar.node.api.consumers.cursor_steps",
    "laminar.node.api.consumers.gates",
    "laminar.node.api.consumers.groups",
    "laminar.node.api.consumers.reclaim",
    "laminar.node.api.delayed.steps",
    "laminar.node.delay.sender",
    "laminar.node.api.records.topic_append",
    "laminar.node.api.transactions.steps",
    "laminar.node.catalog.controller_addresses",
    "laminar.node.catalog.messages.answers",
    "laminar.node.catalog.messages.requests",
    "laminar.node.catch_up.messages",
    "laminar.node.consensus.log_start",
    "laminar.node.consensus.lost_majority",
    "laminar.node.consensus.peer_repair",
    "laminar.node.consensus.raft_wire",
    "laminar.node.partition.snapshot",
    "laminar.node.partition.state.channel_changes",
    "laminar.node.partition.state.channels",
    "laminar.node.partition.state.cursors",
    "laminar.node.partition.state.delayed_records",
    "laminar.node.partition.state.derived_state",
    "laminar.node.partition.state.group_members",
    "laminar.node.partition.state.idempotency_keys",
    "laminar.node.partition.state.pins",
    "laminar.node.partition.state.producers",
    "laminar.node.partition.state.sinks",
    "laminar.node.partition.state.staged_batches",
    "laminar.node.partition.state.staging_entries",
    "laminar.node.trace.ring",
    "laminar.node.partition.state.succession",
    "laminar.node.placement.load",
    "laminar.node.routes.messages",
    "laminar.node.runtime.data_folder",
    "laminar.node.runtime.join",
    "laminar.node.transactions.coordinator",
    "laminar.node.transport.handshake",
    "membership.boot_history",
    "membership.catalog",
    "membership.gossip.gossip",
    "membership.gossip.packets",
    "membership.records",
    "membership.requests",
    "raft.messages",
)

VALUES = {
    "laminar.batch.header.Kind": [f"{each.name} {each.value}" for each in Kind],
    "laminar.node.transport.link.FrameKind": [f"{each.name} {each.value}" for each in FrameKind],
    "membership.requests.Outcome": list(get_args(Outcome)),
}
Fields = dict[str, int]


def formats_now() -> dict[str, list[str]]:
    """Return the names of each format's fields or values, in order; a tag is part of the struct's name."""
    found = dict(VALUES)
    for module in MODULES:
        for name, kind in vars(importlib.import_module(module)).items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module:
                tag = kind.__struct_config__.tag
                found[f"{module}.{name}" + (f" {tag}" if tag is not None else "")] = _fields(kind)
    return found


def _fields(kind: Any) -> list[str]:
    return [
        field.encode_name if field.required else f"{field.encode_name}="
        for field in msgspec.structs.fields(kind)
    ]


def golden() -> dict[str, Fields]:
    """Return the formats as they are kept."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def troubles(kept: dict[str, Fields], now: dict[str, list[str]]) -> list[str]:
    """Return what an older program could not read, or would take for something else."""
    found = [f"{name} is gone" for name in kept if name not in now]
    for name, fields in now.items():
        known = list(kept.get(name, {}))
        if fields[: len(known)] != known:
            found.append(f"{name} had {known}, and has {fields}: fields are only added, at the end")
        elif name in kept:
            found += [
                f"{name}: the new field {each} has no default"
                for each in fields[len(known) :]
                if name not in VALUES and not each.endswith("=")
            ]
    return found


def test_formats_change_only_by_additions() -> None:
    """A node of the older program reads what this one writes, and the other way round."""
    assert [] == troubles(golden(), formats_now())


def test_every_field_is_kept_with_the_code_version_at_which_it_came() -> None:
    """So whoever adds one reads this, and knows when it may be sent."""
    now = {name: list(fields) for name, fields in golden().items()}

    assert now == formats_now(), "see the head of this module"
    newest = max(version for fields in golden().values() for version in fields.values())
    assert newest <= CODE_VERSION, "a field came with a code version that this program does not know"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"S": ["a", "c="]}, ["S had"]),
        ({"S": ["b=", "a"]}, ["S had"]),
        ({"S": ["a", "b=", "c"]}, ["has no default"]),
        ({}, ["is gone"]),
        ({"S": ["a", "b=", "c="], "T": ["x"]}, []),
    ],
)
def test_a_change_that_an_older_program_cannot_read_is_found(
    now: dict[str, list[str]], said: list[str]
) -> None:
    """Renamed, reordered, without a default, removed; and an addition, which is none."""
    found = troubles({"S": {"a": 1, "b=": 1}}, now)

    assert len(said) == len(found) and all(part in text for part, text in zip(said, found, strict=True))


def main() -> int:
    """Add what is new to the kept formats; 1 if something is no addition."""
    kept, now = golden(), formats_now()
    wrong = troubles(kept, now)
    for text in wrong:
        print(text)
    if wrong:
        return 1
    new = 1 if not kept else CODE_VERSION
    after = {
        name: {field: kept.get(name, {}).get(field, new) for field in fields}
        for name, fields in sorted(now.items())
    }
    GOLDEN.write_text(json.dumps(after, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
