"""The header of a batch has one definition: its fields agree with each other, and there is no copy."""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.batch import (
    HEADER_SIZE,
    MAGIC,
    Header,
    Kind,
    as_published,
    as_staged,
    body_of,
    build,
    build_control,
    header_of,
    kind_of,
    stamp,
    term_of,
    verify,
    whole,
)
from laminar.batch.header import LOG_FIELDS, OFFSETS, SEALED_PLACE_FIELDS, fields

SOURCE = Path(__file__).parents[2] / "laminar"
# Where 128 is something else: how many of what.
OTHER_128 = {
    "log/segment/segment.py": "rows kept in memory",
    "log/segment/segment_file.py": "rows of a chunk",
    "node/consensus/election_throttle.py": "elections at once",
    "spark/read/end_offsets.py": "polls",
}


@pytest.fixture
def frame() -> bytearray:
    """A stamped batch in which every number is another."""
    frame = build([b"one", b"two"], tags=["a", None], producer_id=b"p" * 16, producer_epoch=3, sequence=4)
    place = {"index": 11, "term": 12, "prev_term": 10, "base_offset": 13, "append_time_ms": 14}
    stamp(frame, **place, committed_index=9, opens_segment=True)
    return frame


@pytest.mark.parametrize("name", sorted(set(OFFSETS) - {"magic", "version", "reserved"}))
def test_each_field_read_alone_is_what_the_header_says(frame: bytearray, name: str) -> None:
    assert (getattr(Header.unpack(frame), name),) == fields(name).unpack_from(frame)


def test_partial_reads_agree_with_the_header(frame: bytearray) -> None:
    header = Header.unpack(frame)
    assert LOG_FIELDS.unpack_from(frame) == (
        *(header.kind, header.flags, header.index, header.term, header.prev_term, header.base_offset),
        *(header.count, header.body_length, header.append_time_ms, header.tag_mask, header.header_crc),
    )
    assert SEALED_PLACE_FIELDS.unpack_from(frame) == (11, 12, header.body_crc, header.header_crc)
    assert (kind_of(frame), term_of(frame)) == (Kind.DATA, 12)
    assert bytes(body_of(frame)) == bytes(frame[HEADER_SIZE:])


def test_a_partial_read_spans_the_header_and_what_is_asked_of_the_body() -> None:
    frame = build_control(Kind.COMMAND, struct.pack("<IH", 7, 8))
    assert fields("kind", then="IH").unpack_from(frame) == (Kind.COMMAND, 7, 8)
    assert fields("magic").size == HEADER_SIZE


def copies(source: str) -> Iterator[int]:
    """Lines with the header's size or its magic as a literal; 128 KiB and the like are other sizes."""
    tree = ast.parse(source)
    units = {
        node.left
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.Mult)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            size = type(node.value) is int and node.value == HEADER_SIZE and node not in units
            if size or (isinstance(node.value, bytes) and MAGIC in node.value):
                yield node.lineno


def test_no_other_module_has_the_size_of_a_header_or_its_magic() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "batch" / "header.py" and str(path.relative_to(SOURCE)) not in OTHER_128
        for line in copies(path.read_text("utf-8"))
    }
    assert not found, f"take HEADER_SIZE, MAGIC, fields() or body_of() from laminar.batch.header: {found}"


def test_a_copy_is_found() -> None:
    source = 'SIZE = 128\nbody = frame[128:]\nMAGIC = b"LMNB"\nroom = 128 << 20\n'
    assert sorted(copies(source)) == [1, 2, 3]


def test_a_published_stage_is_a_new_header_and_a_view_of_its_body() -> None:
    """Nothing of the body is copied; joined it is a whole batch with the place of its publish."""
    frame = build([b"a", b"b"], keys=[b"k", None])
    as_staged(frame, sink=b"s" * 16, epoch=3, number=4, stage=5, records=2)
    stamp(frame, index=7, term=1, prev_term=1, base_offset=0, append_time_ms=1, committed_index=6)
    publish = build_control(Kind.PUBLISH)
    stamp(publish, index=9, term=2, prev_term=1, base_offset=40, append_time_ms=50, committed_index=8)

    made = as_published(memoryview(frame), publish=Header.unpack(publish), base_offset=41)

    assert made.body.obj is frame and len(made) == len(frame)
    assert header_of(made) is made.head
    header = verify(whole(made))
    place = (header.kind, header.index, header.term, header.base_offset, header.count, header.append_time_ms)
    assert place == (Kind.DATA, 9, 2, 41, 2, 50)
    assert (header.producer_id, header.checkpoint, header.floor) == (bytes(16), 0, 0)
    assert Kind.STAGED == Header.unpack(frame).kind, "the log's own bytes are as they were"
