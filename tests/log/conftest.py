"""Fixtures of the log's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from laminar.log import RealDisk, Storage, StorageSettings

_TIGHT = StorageSettings(
    segment_size_bytes=4096,
    first_journal_file_bytes=64 * 1024,
    journal_file_bytes=256 * 1024,
    checkpoint_bytes=128 * 1024,
    recent_bytes=0,
    idle_marker_ms=1,
)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    """On the real disk, with its threads, keeping nothing in memory that is in a segment."""
    storage = Storage.open(RealDisk(), f"{tmp_path}/home", f"{tmp_path}/logs", settings=_TIGHT)
    yield storage
    await storage.close()
