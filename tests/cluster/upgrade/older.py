"""The program that an upgrade begins with: built from git, run with this environment's packages."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
REVISION_FILE = Path(__file__).with_name("OLDER")
PACKAGES = ("laminar", "raft", "membership", "router", "ebpf")


class NoOlderProgram(Exception):
    """The older program can't be built here; the text says why."""


def revision() -> str:
    """Return the tag or commit that `OLDER` names."""
    lines = REVISION_FILE.read_text().splitlines()
    (named,) = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return named


def older_program() -> Path:
    """Return the folder of the older program's packages, to be put on `PYTHONPATH`; built if it is missing.

    Raises:
        NoOlderProgram: there is no git, or no such revision, as in a shallow clone.
    """
    name = revision()
    target = ROOT / "build" / "older" / name
    if target.exists():
        return target
    command = ["git", "-C", str(ROOT), "archive", name, *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise NoOlderProgram("there is no git") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise NoOlderProgram(f"{name}, the older program, is not in this repository's history ({said})")
    # Under a name of its own first: another run may be building it, too.
    made = target.with_name(f"{name}.{os.getpid()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(made, filter="data")
    try:
        made.rename(target)
    except OSError:
        shutil.rmtree(made)  # the other run was first
    return target
