"""A run of a whole node under the recorder: `laminar serve`, and a client that appends, trims and deletes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from pathlib import Path

from laminar.aio import Client, Topic, connect
from laminar.log.format.settings import MIB
from laminar.testing.nodes import free_host
from tests.crash import trace
from tests.crash.acts import Act, Diary, value

# What `laminar serve` is given, and a check of its folder has to know.
SHARDS = 1
SIZES = {"segment_size_bytes": MIB, "journal_file_bytes": MIB}
# Records of a node are larger than the library's, as its smallest segment is 1 MiB.
TIMES = 24
PARTITIONS = {"commit": 3, "interval": 1}


def record_of(log: str, life: int, offset: int) -> bytes:
    return value(log, life, offset) * TIMES


class Node:
    """A node in a process of its own, recorded if a recorder is given."""

    def __init__(self, data: Path, log: Path) -> None:
        self._data = data
        self._log = log
        self._environment = {
            "LAMINAR_HOST": free_host(),
            "LAMINAR_PORT": "0",
            "LAMINAR_ACCESS": "open",
            "LAMINAR_SHARDS": str(SHARDS),
            **{f"LAMINAR_{name.upper()}": str(size) for name, size in SIZES.items()},
        }

    async def start(self, library: Path | None, file: Path) -> str:
        """Start it; returns its URL when it is ready."""
        command = ["laminar.cli", "serve", "--data", str(self._data)]
        self._process = trace.start(
            command,
            library=library,
            folder=self._data,
            trace=file,
            output=self._log,
            settings=self._environment,
        )
        deadline = asyncio.get_running_loop().time() + 120
        while asyncio.get_running_loop().time() < deadline and self._process.poll() is None:
            node_file = self._data / "node.json"
            if node_file.exists():
                return str(json.loads(node_file.read_bytes())["url"])
            await asyncio.sleep(0.02)
        raise AssertionError(f"the node did not start: {self._log.read_text()[-2000:]}")

    async def stop(self) -> None:
        """End it in order, so that its last calls are recorded; and its children with it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, 120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


async def run(folder: Path, library: Path, *, seed: int, seconds: float) -> list[Act]:
    """Run the load; what was recorded is in `folder`/trace, the data in `folder`/root."""
    diary = Diary()
    rng = random.Random(seed)
    node = Node(folder / "root", folder / "output")
    try:
        url = await node.start(library, folder / "trace")
        async with connect(url) as client:
            until = diary.now() + int(seconds * 1e9)
            await asyncio.gather(
                *(
                    _use(
                        client, policy, random.Random(rng.random()), diary, until, deletes=policy == "commit"
                    )
                    for policy in PARTITIONS
                )
            )
    finally:
        await node.stop()
    return diary.acts


async def _use(
    client: Client, name: str, rng: random.Random, diary: Diary, until: int, *, deletes: bool
) -> None:
    """One topic and all that happens to it. It is made again once, half-way, if it `deletes`."""
    life = 0
    half = (diary.now() + until) // 2
    while diary.now() < until:
        life += 1
        logs = [f"{name}/{partition}" for partition in range(PARTITIONS[name])]
        began = diary.now()
        _note(diary, "create", logs, life, began, None)
        topic = await client.create_topic(name, partitions=len(logs), replicas=1, settings={"flush": name})
        _note(diary, "create", logs, life, began, diary.now())
        if name == "interval":
            _note(diary, "policy", logs, life, began, began, interval=True)
        end = half if deletes and life == 1 else until
        await asyncio.gather(
            *(
                _write(topic, partition, life, random.Random(rng.random()), diary, end)
                for partition in range(len(logs))
            )
        )
        if end < until:
            began = diary.now()
            _note(diary, "delete", logs, life, began, None)
            await topic.delete()
            _note(diary, "delete", logs, life, began, diary.now())


async def _write(
    topic: Topic[bytes], partition: int, life: int, rng: random.Random, diary: Diary, until: int
) -> None:
    log, offset = f"{topic.name}/{partition}", 0
    while diary.now() < until:
        for _ in range(rng.choice((1, 3, 10))):
            began = diary.now()
            _note(diary, "append", [log], life, began, None, offset=offset, stop=offset + 1)
            receipt = await topic.append(record_of(log, life, offset), partition=partition)
            assert receipt.offset == offset, (receipt, offset)
            offset += 1
            _note(diary, "append", [log], life, began, diary.now(), offset=offset - 1, stop=offset)
        await asyncio.sleep(rng.choice((0, 0.002, 0.02)))
        if rng.random() < 0.03:
            before = rng.randint(0, offset)
            began = diary.now()
            _note(diary, "trim", [log], life, began, None, offset=before)
            trimmed = await topic.delete_before(before, partition=partition)
            _note(diary, "trim", [log], life, began, diary.now(), offset=before, stop=trimmed.start_offset)


def _note(
    diary: Diary, doing: str, logs: list[str], life: int, began: int, ended: int | None, **fields: int | bool
) -> None:
    for log in logs:
        diary.acts.append(Act(doing=doing, log=log, life=life, began=began, ended=ended, **fields))  # type: ignore[arg-type]
