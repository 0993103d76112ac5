"""A disk after a crash, opened by the product and compared with what was promised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from laminar.batch import Batch
from laminar.batch.header import Kind
from laminar.log import RecordsLost, ShardLayout, Storage, StorageSettings, recover_node, shard_store
from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import StorageError
from laminar.log.format.settings import MIB
from laminar.log.library.folder import LogFolder
from laminar.log.library.local_log import LocalLog
from laminar.log.partition_log.log import Log
from laminar.log.recovery.node import logs_directory
from tests.crash import node_load
from tests.crash.acts import Promised, value
from tests.crash.library_load import SETTINGS, disk_after
from tests.crash.node_load import SHARDS


def library(folder: Path, promises: Mapping[str, Promised], crash: str) -> list[str]:
    """What is wrong with a folder of logs: one line each, empty if all is as promised."""
    try:
        return asyncio.run(_library(folder, promises, crash))
    except (StorageError, AssertionError) as error:
        return [f"the folder does not open: {error!r}"]


async def _library(folder: Path, promises: Mapping[str, Promised], crash: str) -> list[str]:
    problems = []
    opened = await LogFolder.open(folder, settings=SETTINGS, disk=disk_after(crash))
    try:
        for name, promised in promises.items():
            if name not in opened.names:
                if promised.must:
                    problems.append(f"{name}: lost: there is no such log")
            elif not promised.may:
                problems.append(f"{name}: a deleted log is there again")
            else:
                try:
                    log = await opened.log(name, create=False)
                except RecordsLost as error:
                    problems.append(f"{name}: lost: {error}")
                else:
                    problems += [f"{name}: {each}" async for each in _log(log, name, promised, crash)]
    finally:
        await opened.close()
    return problems


async def _log(log: LocalLog, name: str, promised: Promised, crash: str) -> AsyncIterator[str]:
    needed = promised.kept if crash == "kill" else promised.durable
    if log.records_lost:
        yield "marked: acknowledged records may be missing, after no damage"
    if log.end_offset < max(needed, promised.lowest):
        yield f"lost: ends at {log.end_offset}, acknowledged up to {needed}"
    if log.end_offset > promised.tried:
        yield f"invented: ends at {log.end_offset}, appended up to {promised.tried}"
    if not promised.lowest <= log.start_offset <= promised.highest:
        yield f"begins at {log.start_offset}, not at {promised.lowest} to {promised.highest}"
    offset = log.start_offset
    try:
        async for record in log.read():
            if record.offset != offset:
                yield f"silent: {record.offset} was read where {offset} follows"
            if bytes(record.value) != value(name, promised.life, record.offset):
                yield f"wrong: the record at {record.offset} is not what was appended"
                break
            offset = record.offset + 1
    except StorageError as error:
        yield f"damaged: {error}"
    else:
        if offset != log.end_offset:
            yield f"silent: reading ended at {offset}, the log ends at {log.end_offset}"
    if not log.records_lost:
        receipt = await log.append([value(name, promised.life, log.end_offset)])
        if receipt.offset != offset:
            yield f"the next record got {receipt.offset}, not {offset}"


def node(folder: Path, promises: Mapping[str, Promised], crash: str) -> list[str]:
    """What is wrong with a node's data folder, recovered as a start does it."""
    try:
        sizes = StorageSettings(**node_load.SIZES)
        disk = disk_after(crash)
        recover_node(disk, str(folder), shards=SHARDS, shard_of=lambda entry, shards: 0, settings=sizes)
        home = shard_store(str(folder), ShardLayout(1, SHARDS), 0)
        return asyncio.run(_node(disk, home, logs_directory(str(folder)), sizes, promises, crash))
    except (StorageError, AssertionError) as error:
        return [f"the node does not start: {error!r}"]


async def _node(
    disk: Disk,
    home: str,
    logs: str,
    sizes: StorageSettings,
    promises: Mapping[str, Promised],
    crash: str,
) -> list[str]:
    problems = []
    storage = Storage.open(disk, home, logs, settings=sizes)
    try:
        # A topic that was made anew is another group: the newest is the one that counts.
        newest = {f"{entry.topic}/{entry.partition}": entry for entry in storage.manifest.entries}
        for name, promised in promises.items():
            entry = newest.get(name)
            if entry is None or entry.log_id not in storage.logs:
                if promised.must and promised.kept > promised.lowest:
                    problems.append(f"{name}: lost: there is no such replica")
            elif entry.replica_id in storage.lost_hard_states:
                problems.append(f"{name}: lost: its term and vote are in doubt, after no damage")
            else:
                found = _replica(storage.logs[entry.log_id], name, promised, crash)
                problems += [f"{name}: {each}" async for each in found]
    finally:
        await storage.close()
    return problems


async def _replica(log: Log, name: str, promised: Promised, crash: str) -> AsyncIterator[str]:
    records: dict[int, bytes] = {}
    offset = log.start.offset
    index = log.start.index + 1
    try:
        while index <= log.last_index:
            for frame in await log.read(index, log.last_index, max_bytes=MIB):
                index += 1
                batch = Batch(frame, verified=True)
                if batch.header.kind is Kind.DATA:
                    if batch.base_offset != offset:
                        yield f"silent: offset {batch.base_offset} where {offset} follows"
                    records |= {record.offset: bytes(record.value) for record in batch.records()}
                    offset = batch.next_offset
    except StorageError as error:
        yield f"damaged: {error}"
    lives = {life for life in (promised.life, promised.life - 1) if life > 0}
    for life in sorted(lives, reverse=True):
        wrong = [at for at, found in records.items() if found != node_load.record_of(name, life, at)]
        if not wrong:
            break
    else:
        yield f"wrong: the records at {wrong[:5]} are not what was appended"
    if life != promised.life:
        # The topic is being made anew, and its former life is still there.
        if promised.must and promised.kept:
            yield f"lost: only life {life} is there"
        return
    needed = promised.kept if crash == "kill" else promised.durable
    if log.recovering and not (crash == "power" and promised.interval):
        yield "marked: acknowledged records may be missing, after no damage"
    if offset < needed:
        yield f"lost: ends at {offset}, acknowledged up to {needed}"
    if offset < promised.kept and not log.recovering:
        yield f"silent: ends at {offset}, acknowledged up to {promised.kept}, and is not marked"
    if offset > promised.tried:
        yield f"invented: ends at {offset}, appended up to {promised.tried}"
    if records and not min(records) <= max(promised.highest, 0):
        yield f"begins at {min(records)}, trimmed up to {promised.highest}"
