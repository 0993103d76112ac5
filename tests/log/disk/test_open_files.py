"""How many files a process may open bounds how many are open, and not how many partitions are written to."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.log import RealDisk, Storage, raise_open_file_limit
from laminar.log.disk import open_files
from tests.log.histories import frame_for

_LOGS = 80
_LIMIT = 64
# With so few open files allowed, every log gets a record, and every one has it after a kill.
_PROGRAM = f"""
import asyncio, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({_LIMIT} // 2, {_LIMIT}))
from laminar.log import RealDisk, Storage
from tests.log.histories import contents, frame_for

async def main(path, life):
    storage = Storage.open(RealDisk(), path + "/home", path + "/logs")
    logs = list(storage.logs.values())
    logs = logs or [storage.create_log("log", number + 1) for number in range({_LOGS})]
    for entry in range(life, life + 2):
        for log in logs:
            assert log.failure is None and len(contents(log)) == entry, log
            log.append([frame_for(log, [b"value"])])
        await storage.sync()
        if entry % 2 == 0:
            await storage.checkpoint()
    os._exit(0)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_more_logs_than_open_files_are_written_and_recovered(tmp_path: Path) -> None:
    for life in ("0", "2", "4"):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, f"{tmp_path}", life],
            capture_output=True,
            text=True,
            timeout=300,  # each life syncs hundreds of files
        )

        assert (0, "") == (done.returncode, done.stderr)


async def test_segments_that_wait_for_a_sync_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "raise_open_file_limit", lambda: _LIMIT)
    storage = Storage.open(RealDisk(), f"{tmp_path}/home", f"{tmp_path}/logs")
    logs = [storage.create_log("log", number + 1) for number in range(_LOGS)]
    for log in logs:
        log.append([frame_for(log, [b"value"])])
    await storage.sync()
    done = asyncio.get_running_loop().create_future()
    storage._executor.after_synced_frames(
        lambda: storage._commits.call_on_loop(lambda: done.set_result(None))
    )
    await done

    files = storage._recovered.readers.resources.files

    assert sum(handle.unsynced for handle in files._open) <= files.unsynced_limit + 1
    assert len(files) <= _LIMIT // 2 + 2
    await storage.close()


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert hard == raise_open_file_limit()
        assert (hard, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
