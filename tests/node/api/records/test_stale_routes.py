"""Which requests for a partition by number are refused as an old route placed their keys, and which never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from laminar.batch import BATCH_TYPE, build
from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from laminar.http.api.problems import Problem
from laminar.node.api.records.stale_routes import route_said
from tests.node.api.records.routed import opened, problem_of

KEYED = bytes(build([b"v"], keys=[b"k"]))
PLAIN = bytes(build([b"v"]))


def by(batch: bytes, sequence: int) -> bytes:
    keys = [b"k"] if batch == KEYED else None
    return bytes(build([b"v"], keys=keys, producer_id=b"p" * 16, sequence=sequence))


async def test_keys_are_refused_that_were_placed_before_the_partition_was_opened(tmp_path: Path) -> None:
    """Partition 0 was split to 2 and 3 by route 1; partition 1 is as it was."""
    async with opened(tmp_path, partitions=2) as routed:
        assert "0" == _route(await routed.append(1, KEYED, content_type=BATCH_TYPE))
        await routed.change(0, cuts=(10_000,))

        for number, said, refused in (
            (2, None, True),
            (2, "0", True),
            (2, "1", False),
            (2, "9", False),  # a route that this node does not know yet
            (1, None, True),
            (1, "0", False),
        ):
            headers = {"content_type": BATCH_TYPE} | ({} if said is None else {"laminar_route": said})
            if not refused:
                assert "1" == _route(await routed.append(number, KEYED, **headers)), (number, said)
                continue
            problem = await problem_of(routed.append(number, KEYED, **headers))
            value = None if said is None else int(said)
            assert ("stale_route", 409, "not_applied", value, 1) == (
                *(problem.code, problem.status, problem.outcome, problem.value, problem.limit),
            ), (number, said)
        assert {1: 2, 2: 2} == {number: len(found) for number, found in (await routed.values()).items()}


async def test_however_the_keys_are_said(tmp_path: Path) -> None:
    """In the query, in lines, in a batch among batches, under an idempotency key; accepted or not."""
    async with opened(tmp_path) as routed:
        await routed.change(0, cuts=(10_000,))
        lines = (json.dumps({"value": "x"}) + "\n" + json.dumps({"value": "y", "key": "k"}) + "\n").encode()

        for refused in (
            routed.append(1, b"x", "?key=k"),
            routed.append(1, lines, content_type=ENVELOPE_LINES_TYPE),
            routed.append(1, PLAIN + KEYED, content_type=BATCH_TYPE),
            routed.append(1, by(KEYED, 0), content_type=BATCH_TYPE),
            routed.append(1, by(KEYED, 0), "?ack=accepted", content_type=BATCH_TYPE),
            routed.append(1, b"x", "?key=k", idempotency_key="r"),
        ):
            assert "stale_route" == (await problem_of(refused)).code
        assert {} == await routed.values()


async def test_what_has_no_key_is_not_asked(tmp_path: Path) -> None:
    async with opened(tmp_path) as routed:
        await routed.change(0, cuts=(10_000,))
        null = json.dumps({"value": "x", "key": None}).encode()

        await routed.append(1, b"x")
        await routed.append(1, PLAIN, content_type=BATCH_TYPE)
        await routed.append(1, null, content_type=ENVELOPE_LINES_TYPE)
        await routed.append(1, PLAIN, content_type=BATCH_TYPE, laminar_route="0")

        assert 4 == len((await routed.values())[1])


async def test_a_batch_that_is_there_gets_its_receipt_whatever_it_says_of_routes(tmp_path: Path) -> None:
    """As `stale_route` a client would send it elsewhere; it is in the log."""
    async with opened(tmp_path, partitions=2) as routed:
        first = [
            await routed.append(1, by(KEYED, 0), content_type=BATCH_TYPE),
            await routed.append(1, b"x", "?key=k", idempotency_key="r"),
        ]
        await routed.change(0, cuts=(10_000,))

        again = [
            await routed.append(1, by(KEYED, 0), content_type=BATCH_TYPE),
            await routed.append(1, b"x", "?key=k", idempotency_key="r"),
        ]

        assert [bytes(each.body) for each in first] == [bytes(each.body) for each in again]  # type: ignore[arg-type]
        assert all(("Laminar-Replayed", "1") in each.headers for each in again)
        assert (
            "stale_route" == (await problem_of(routed.append(1, by(KEYED, 1), content_type=BATCH_TYPE))).code
        )


async def test_a_leader_whose_view_is_old_knows_from_its_log_when_it_was_opened(tmp_path: Path) -> None:
    """It leads since the node with the newer view died. The view then knows of no other route."""
    async with opened(tmp_path) as routed:
        before = routed.state
        await routed.change(0, cuts=(10_000,))
        routed.services.show(before)
        routed.topics.version("t")

        problem = await problem_of(routed.append(1, KEYED, content_type=BATCH_TYPE, laminar_route="0"))
        said = await routed.append(1, KEYED, content_type=BATCH_TYPE, laminar_route="1")

        assert ("stale_route", 1) == (problem.code, problem.limit)
        assert "0" == _route(said), "what the node knows"


async def test_a_leader_that_lacks_the_entry_of_its_opening_knows_it_from_the_view(tmp_path: Path) -> None:
    """A damaged entry was left out for good."""
    async with opened(tmp_path) as routed:
        await routed.change(0, cuts=(10_000,))
        succession = routed[1].state.succession
        succession.restore(replace(succession.stored(), successor_of=0, opened=None))

        problem = await problem_of(routed.append(1, KEYED, content_type=BATCH_TYPE, laminar_route="0"))

        assert "stale_route" == problem.code


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "9" * 17, "²"])
def test_a_version_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(Problem) as refused:
        route_said({"laminar-route": text})

    assert ("invalid", "laminar-route") == (refused.value.code, refused.value.field)


def _route(answer: object) -> str:
    block: bytes = answer.header_block  # type: ignore[attr-defined]
    return block.split(b"Laminar-Route: ")[1].split(b"\r\n")[0].decode()
