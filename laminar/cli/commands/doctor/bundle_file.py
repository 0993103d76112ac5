"""The file of `laminar doctor --bundle`: a tar.gz with the bundle of each node, and what the doctor found."""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from laminar.cli.commands.doctor.lines import Line
from laminar.cli.errors import UsageError

FOLDER: Final = "laminar-bundle"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")

# Checks whose words are the doctor's own. Others quote what a node says, which may have names that clients
# gave: of these only the check is named.
OWN_WORDS: Final = frozenset(
    (
        *("versions", "settings", "names", "open files", "locked memory", "free space", "sync time"),
        *("clocks", "ports", "certificates", "audit", "programs", "catalog", "leaders", "leaderless"),
        *("appends refused", "under-replicated", "route", "damage", "bundle", "cluster"),
    )
)
README: Final = """\
What the nodes of a Laminar cluster say of themselves, and what `laminar doctor` found.

doctor.json       the doctor's lines
nodes/NAME.json   GET /v1/nodes/NAME/bundle: versions, settings, limits, states, metrics, the end of each log

Names of nodes, hosts and topics are in it. Records, keys, tokens, secrets, certificates' keys, and names of
principals, consumers and channels are not. Read it before you send it: `tar -xzOf FILE | less`.
"""


def check_new(file: Path) -> None:
    """Refuse a file that exists. Raises `UsageError`."""
    if file.exists():
        raise UsageError(f"--bundle {file}: it exists, and nothing is overwritten")


def write(file: Path, lines: Sequence[Line], bundles: Mapping[str, Any]) -> None:
    """Write the file, which only its owner may read. `bundles` has the documents by the nodes' names."""
    shown = [
        {
            "status": line.status,
            "check": line.check,
            "where": line.where,
            "finding": line.finding if line.check in OWN_WORDS else "",
        }
        for line in lines
    ]
    content = {"README.txt": README.encode(), "doctor.json": _json(shown)}
    content |= {
        f"nodes/{name}.json": _json(bundle) for name, bundle in sorted(bundles.items()) if _NAME.match(name)
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"--bundle {file}: it exists, and nothing is overwritten") from None
    with open(opened, "wb") as out:
        out.write(packed.getvalue())


def _json(document: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
