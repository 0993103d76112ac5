"""What a change of the route drops that does not wait any longer: all that no decision may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.batch import Header, build, build_part
from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.transactions.participant import Batch, Participant
from laminar.node.transactions.uploads import Uploads
from tests.node.alone import lone_partition, values
from tests.node.partition.seals import SEAL

PREPARED = Batch(sink=b"p" * 16, number=1, epoch=1)
STAGED = Batch(sink=b"s" * 16, number=1, epoch=1)
UPLOAD = b"u" * 16


async def stage(partition: Partition, batch: Batch, value: bytes) -> None:
    frame = build([value])
    await Participant(partition).stage(batch, 0, frame, Header.unpack(frame))


async def test_stages_and_uploads_are_dropped_and_what_is_prepared_stays(tmp_path: Path) -> None:
    """Then the partition can be sealed as soon as the prepared batch is published."""
    async with lone_partition(tmp_path) as partition:
        staging = Participant(partition)
        await stage(partition, PREPARED, b"prepared")
        await staging.prepare(PREPARED, [0])
        await stage(partition, STAGED, b"staged")
        await Uploads(partition).part(UPLOAD, build_part(b"x", upload=UPLOAD, number=0))

        assert 2 == staging.drop_unprepared()
        assert 1 == partition.hold(0) and staging.knows(PREPARED)
        assert 0 == staging.drop_unprepared()
        for late in (
            lambda: staging.prepare(STAGED, [0]),
            lambda: Uploads(partition).publish(UPLOAD, parts=1, size_bytes=1, crc32c=1, stub=b""),
        ):
            with pytest.raises(Problem) as refused:
                await late()
            assert ("no_stage", "not_applied") == (refused.value.code, refused.value.outcome)
        await staging.publish(PREPARED)
        assert 1 == (await partition.propose_seal(SEAL)).offset
        assert [b"prepared"] == await values(partition)
