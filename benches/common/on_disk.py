"""What every benchmark that needs a disk asks for: its options, and a folder of its own where syncs count."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benches.common import usage


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """`--quick` and `--directory`."""
    found = argparse.ArgumentParser(prog=prog, description=description)
    found.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    found.add_argument("--directory", type=Path, default=Path("bench-out"), help="on the disk to be measured")
    return found


def filesystem(directory: Path) -> str:
    """The type of file system there; made if need be. Ends the process where nothing is synced."""
    directory.mkdir(parents=True, exist_ok=True)
    kind = usage.filesystem(directory)
    if kind == "tmpfs":
        sys.exit(f"{directory} is on tmpfs, where nothing is synced: give --directory on a disk")
    return kind


@contextmanager
def folder(directory: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `directory`, gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
    try:
        yield made
    finally:
        shutil.rmtree(made)
