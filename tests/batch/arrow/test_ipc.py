"""The Arrow stream without pyarrow, against pyarrow: it reads what we write, we read what it writes."""

from __future__ import annotations

import io
import struct
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.batch import MAX_TIME_MS, Batch, BatchError, Codec, Column, build, stamp
from laminar.batch.arrow.ipc_writer import (
    END,
    FIELDS,
    Field,
    Type,
    batch_parts,
    fields,
    read_stream,
    record_batch_message,
    schema_message,
    write_stream,
)
from laminar.batch.arrow.pyarrow_out import table, to_arrow

BASE = 1000
APPENDED_MS = 1_700_000_000_000


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `build`: the columns that Arrow sees, with and without holes."""
    count = draw(st.integers(1, 20))
    arguments: dict[str, Any] = {
        "values": draw(st.lists(st.binary(max_size=40), min_size=count, max_size=count)),
        "codec": draw(st.sampled_from([Codec.NONE, Codec.ZSTD])),
    }
    columns: dict[str, st.SearchStrategy[Any]] = {
        "keys": st.none() | st.binary(max_size=12),
        "timestamps": st.none() | st.integers(-MAX_TIME_MS, MAX_TIME_MS),
        "tags": st.none() | st.text(max_size=5),
        "headers": st.none() | st.dictionaries(st.text(max_size=4), st.binary(max_size=8), max_size=3),
    }
    for name, cells in columns.items():
        if draw(st.booleans()):
            arguments[name] = draw(st.lists(cells, min_size=count, max_size=count))
    return arguments


def stamped(arguments: dict[str, Any], *, base: int = BASE, append_time_ms: int = APPENDED_MS) -> Batch:
    frame = build(**arguments)
    stamp(
        frame,
        index=1,
        term=1,
        prev_term=0,
        base_offset=base,
        append_time_ms=append_time_ms,
        committed_index=0,
    )
    return Batch(frame)


def expected_columns(arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """What a table of these records holds, times as integers."""
    count = len(arguments["values"])
    nothing = [None] * count
    times = arguments.get("timestamps") or nothing
    return {
        "offset": list(range(BASE, BASE + count)),
        "timestamp": [1000 * (APPENDED_MS if time is None else time) for time in times],
        "key": arguments.get("keys") or nothing,
        "value": arguments["values"],
        "tag": arguments.get("tags") or nothing,
        "headers": [list(one.items()) if one else None for one in arguments.get("headers") or nothing],
    }


def columns_of(table: pyarrow.Table | pyarrow.RecordBatch) -> dict[str, list[Any]]:
    table.validate(full=True)
    return {
        name: table.column(name).cast("int64").to_pylist()
        if name == "timestamp"
        else table.column(name).to_pylist()
        for name in table.schema.names
    }


def opened(parts: list[Any]) -> pyarrow.Table:
    return pyarrow.ipc.open_stream(b"".join(parts)).read_all()


def arrow_stream(*tables: pyarrow.Table | pyarrow.RecordBatch, **options: Any) -> bytes:
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(
        sink, tables[0].schema, options=pyarrow.ipc.IpcWriteOptions(**options)
    ) as writer:
        for table in tables:
            writer.write(table)
    return sink.getvalue()


@given(records())
def test_a_batch_becomes_a_record_batch(arguments: dict[str, Any]) -> None:
    """`to_arrow` gives each record's cells, null where it has none."""
    assert expected_columns(arguments) == columns_of(to_arrow(stamped(arguments), list(FIELDS)))


@given(st.lists(records(), max_size=4))
def test_pyarrow_reads_what_we_write(many: list[dict[str, Any]]) -> None:
    """The stream of a server without pyarrow and `to_arrow` of a client with it are the same table."""
    batches = [stamped(arguments) for arguments in many]
    for names in (None, list(FIELDS)):
        found = opened(write_stream(batches, names))

        schema = to_arrow(Batch(build([b"a"])), names).schema
        assert schema == found.schema
        assert pyarrow.Table.from_batches([to_arrow(batch, names) for batch in batches], schema) == found
        found.validate(full=True)


@given(st.lists(st.tuples(records(), st.booleans()), max_size=5))
def test_many_batches_become_one_table(many: list[tuple[dict[str, Any], bool]]) -> None:
    """`table` is the join of what `to_arrow` gives of each batch, whether or not their offsets follow."""
    batches = []
    base = BASE
    for arguments, gap in many:
        base += 7 * gap
        batches.append(stamped(arguments, base=base, append_time_ms=APPENDED_MS + base))
        base += len(batches[-1])
    for names in (None, list(FIELDS), ["timestamp"], ["key", "offset"]):
        found = table(batches, names)

        parts = [to_arrow(batch, names) for batch in batches]
        assert pyarrow.Table.from_batches(parts, to_arrow(Batch(build([b"a"])), names).schema) == found
        found.validate(full=True)


@given(records(), st.data())
def test_rows_can_be_picked(arguments: dict[str, Any], data: st.DataObject) -> None:
    """A fetch that begins inside of a batch, or that filters, sends those records and no others."""
    batch = stamped(arguments)
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True).map(sorted))
    names = data.draw(st.permutations(list(FIELDS)).map(lambda order: order[: len(rows) % 6 + 1]))
    wanted = fields(names)
    table = opened([schema_message(wanted), *batch_parts(batch, wanted, rows), END])

    everything = expected_columns(arguments)
    assert {name: [everything[name][row] for row in rows] for name in names} == columns_of(table)
    assert names == to_arrow(batch, list(names)).schema.names


def test_values_go_out_in_the_frame_itself() -> None:
    """What is sent is the frame, not a copy of it."""
    batch = stamped({"values": [b"a" * 100] * 10})
    parts = batch_parts(batch, fields(["value"]))

    assert any(part is batch.frame for part in parts)
    assert len(parts) == 2
    # In pyarrow too: the table's memory is the frame's.
    frame = pyarrow.py_buffer(batch.frame)
    values = to_arrow(batch, ["value"]).column(0).buffers()[2]
    assert frame.address <= values.address < frame.address + frame.size


def test_a_frame_that_lies_askew_in_memory_is_read() -> None:
    """Frames back to back behind something odd: the offsets are copied, as Arrow wants them aligned."""
    frame = bytes(build([b"one", b"two"], timestamps=[1, None], keys=[None, b"k"]))
    for shift in range(8):
        batch = Batch(memoryview(bytes(shift) + frame)[shift:])
        assert columns_of(to_arrow(batch))["value"] == [b"one", b"two"]
        assert columns_of(to_arrow(batch))["key"] == [None, b"k"]
        assert to_arrow(batch, ["value"]).column(0).buffers()[1].address % 8 == 0


@given(records())
@settings(max_examples=30)
def test_what_went_out_comes_in(arguments: dict[str, Any]) -> None:
    """Our own stream, without the column of offsets, is an append of the same records."""
    batch = stamped(arguments)
    names = ["value", "key", "tag", "timestamp", "headers"]
    (rows,) = read_stream(b"".join(write_stream([batch], names)))

    again = Batch(
        build(rows.values, keys=rows.keys, tags=rows.tags, timestamps=rows.timestamps, headers=rows.headers)
    )
    assert batch.values == again.values
    assert batch.keys == again.keys
    assert batch.tags == again.tags
    assert batch.timestamps == again.timestamps
    assert batch.headers == again.headers


def test_unknown_columns_are_refused_by_name() -> None:
    batch = stamped({"values": [b"a"]})
    for ask in (lambda: to_arrow(batch, ["colour"]), lambda: write_stream([batch], ["colour"])):
        with pytest.raises(ValueError, match=r"no Arrow column 'colour'; there are offset, timestamp"):
            ask()


def test_messages_are_those_of_the_format() -> None:
    """Mark, length, metadata padded to 8, body; and zeros at the end."""
    message = schema_message([Field("offset", Type.INT64)])
    mark, length = struct.unpack_from("<II", message)
    assert (mark, length + 8) == (0xFFFFFFFF, len(message))
    assert len(message) % 8 == 0
    batch = record_batch_message(2, [(2, 0)], [(0, 0), (0, 16)], 16)
    table = opened([message, batch, struct.pack("<qq", 5, -6), END])
    assert table.to_pydict() == {"offset": [5, -6]}
    with pytest.raises(AssertionError, match="body of 17"):
        record_batch_message(2, [(2, 0)], [(0, 0), (0, 17)], 17)


@given(records(), st.sampled_from([pyarrow.binary(), pyarrow.utf8()]), st.booleans())
def test_we_read_what_pyarrow_writes(arguments: dict[str, Any], kind: Any, sliced: bool) -> None:
    """Values and keys as binary or text, any column left out, in any order, whole or a slice."""
    if kind == pyarrow.utf8():
        arguments["values"] = [value.hex().encode() for value in arguments["values"]]
        arguments["keys"] = [key and key.hex().encode() for key in arguments.get("keys") or []] or None
    columns: dict[str, Any] = {}
    if arguments.get("tags"):
        columns["tag"] = pyarrow.array(arguments["tags"], pyarrow.utf8())
    if arguments.get("keys"):
        columns["key"] = pyarrow.array(arguments["keys"], pyarrow.binary()).cast(kind)
    columns["value"] = pyarrow.array(arguments["values"], pyarrow.binary()).cast(kind)
    if arguments.get("timestamps"):
        columns["timestamp"] = pyarrow.array(arguments["timestamps"], pyarrow.timestamp("ms"))
    first = 1 if sliced else 0
    table = pyarrow.table(columns).slice(first)
    rows = list(read_stream(arrow_stream(table, table)))

    if len(table) == 0:
        assert rows == []
        return
    assert len(rows) == 2 and rows[0] == rows[1] and len(rows[0]) == len(table)
    assert arguments["values"][first:] == rows[0].values
    for name, found in (
        ("keys", rows[0].keys),
        ("tags", rows[0].tags),
        ("timestamps", rows[0].timestamps),
    ):
        assert (arguments.get(name) or None) is None or arguments[name][first:] == found


@given(
    st.lists(st.none() | st.dictionaries(st.text(max_size=4), st.binary(max_size=6), max_size=3), min_size=1)
)
@pytest.mark.parametrize("form", ["map", "list"])
def test_headers_come_as_a_map_or_a_list_of_pairs(form: str, headers: list[dict[str, bytes] | None]) -> None:
    kind = (
        pyarrow.map_(pyarrow.utf8(), pyarrow.binary())
        if form == "map"
        else pyarrow.list_(pyarrow.struct([("key", pyarrow.utf8()), ("value", pyarrow.binary())]))
    )
    cells = [
        None if one is None else [(k, v) if form == "map" else {"key": k, "value": v} for k, v in one.items()]
        for one in headers
    ]
    table = pyarrow.table({"value": [b"v"] * len(headers), "headers": pyarrow.array(cells, kind)})
    (rows,) = read_stream(arrow_stream(table))

    assert headers == rows.headers
    assert [one or {} for one in headers] == (
        Batch(build(rows.values, headers=rows.headers)).headers or []
    ) or (not any(headers))


@pytest.mark.parametrize(
    ("unit", "number"), [("s", 2), ("ms", 2000), ("us", 2_000_999), ("ns", 2_000_999_999)]
)
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_times_of_every_unit_become_ms(unit: str, number: int, zone: str | None) -> None:
    times = pyarrow.array([number, None], pyarrow.timestamp(unit, zone))
    (rows,) = read_stream(arrow_stream(pyarrow.table({"value": [b"a", b"b"], "timestamp": times})))

    assert rows.timestamps == [2000, None]


def test_plain_integers_are_ms() -> None:
    (rows,) = read_stream(arrow_stream(pyarrow.table({"value": [b"a"], "timestamp": [7]})))
    assert rows.timestamps == [7]


VALUES = pyarrow.array([b"a"])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"value": VALUES.cast(pyarrow.large_binary())}, "value is large_binary; .* binary or utf8"),
        ({"value": pyarrow.array(["a"], pyarrow.large_utf8())}, "value is large_utf8"),
        ({"value": pyarrow.array([b"a"], pyarrow.binary_view())}, "value is binary_view"),
        ({"value": pyarrow.array([b"a"], pyarrow.binary(1))}, "value is fixed_size_binary"),
        ({"value": pyarrow.array(["a"]).dictionary_encode()}, "value is dictionary"),
        ({"value": pyarrow.array([1])}, "value is int"),
        ({"value": VALUES, "tag": VALUES}, "tag is binary; .* utf8"),
        ({"value": VALUES, "key": pyarrow.array([1])}, "key is int"),
        ({"value": VALUES, "timestamp": pyarrow.array([1], pyarrow.int32())}, "timestamp is another int"),
        ({"value": VALUES, "timestamp": pyarrow.array([1], pyarrow.date64())}, "timestamp is date"),
        ({"value": VALUES, "headers": pyarrow.array([["a"]])}, "headers is a list of something else"),
        (
            {"value": VALUES, "headers": pyarrow.array([[("a", 1)]], pyarrow.map_("utf8", "int64"))},
            "headers is a map of utf8, int",
        ),
        ({"value": VALUES, "offset": pyarrow.array([1])}, "column is 'offset'; .* value, key, tag"),
    ],
)
def test_other_columns_are_refused_by_name(columns: dict[str, Any], words: str) -> None:
    """Nothing is guessed or dropped in silence: the error names the column and what can be taken."""
    with pytest.raises(BatchError, match=words) as caught:
        list(read_stream(arrow_stream(pyarrow.table(columns))))
    assert caught.value.code == "unsupported"


def test_compressed_streams_are_refused() -> None:
    stream = arrow_stream(pyarrow.table({"value": [b"a" * 1000]}), compression="zstd")
    with pytest.raises(BatchError, match="compressed buffers"):
        list(read_stream(stream))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"key": VALUES}, "the column value is missing"),
        ({"value": pyarrow.array([b"a", None])}, "value is wrong: null in record 1"),
    ],
)
def test_records_need_values(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words) as caught:
        list(read_stream(arrow_stream(pyarrow.table(columns))))
    assert caught.value.code == "malformed"


def test_two_columns_of_one_name_are_refused() -> None:
    table = pyarrow.Table.from_arrays([VALUES, VALUES], ["value", "value"])
    with pytest.raises(BatchError, match="a name occurs twice"):
        list(read_stream(arrow_stream(table)))


def sample() -> bytes:
    """A stream with every column that can be taken, and holes."""
    table = pyarrow.table(
        {
            "value": [b"one", b"", b"three"],
            "key": pyarrow.array(["k", None, ""]),
            "tag": ["red", None, "blue"],
            "timestamp": pyarrow.array([1, None, 3], pyarrow.timestamp("us", "UTC")),
            "headers": pyarrow.array([[("a", b"1")], None, []], pyarrow.map_("utf8", "binary")),
        }
    )
    return arrow_stream(table, table.slice(1))


def test_a_stream_is_whole_or_refused() -> None:
    """Cut anywhere it is refused, but for a cut between messages, as a stream may just end (Arrow)."""
    stream = sample()
    whole = list(read_stream(stream))
    accepted = []
    for size in range(len(stream)):
        try:
            found = list(read_stream(stream[:size]))
        except BatchError as error:
            assert error.code == "malformed"
        else:
            accepted.append(size)
            assert whole[: len(found)] == found

    assert len(accepted) == 3, "behind the schema and behind each record batch"
    for behind in (b"\0", stream):
        with pytest.raises(BatchError, match="after the end"):
            list(read_stream(stream + behind))
    assert list(read_stream(bytearray(stream))) == list(read_stream(memoryview(stream))) == whole


_TWO = struct.pack("<3i4x", 0, 1, 2) + b"ab".ljust(8, b"\0")  # two cells: offsets at 0, bytes at 16
_GOOD = [(0, 0), (0, 12), (16, 2)]


@pytest.mark.parametrize(
    ("length", "nodes", "buffers", "body", "words"),
    [
        (3, [(2, 0)], _GOOD, _TWO, "2 cells in a batch of 3"),
        (3, [(3, 0)], _GOOD, _TWO, "12 bytes for 3 cells"),
        (2, [(2, 0), (2, 0)], _GOOD, _TWO, "more than the schema's"),
        (2, [(2, 0)], [*_GOOD, (0, 0)], _TWO, "more than the schema's"),
        (2, [(2, 0)], _GOOD[:2], _TWO, "fewer than the schema's"),
        (2, [], _GOOD, _TWO, "fewer than the schema's"),
        (2, [(-1, 0)], _GOOD, _TWO, "length is wrong: -1"),
        (2, [(2, 1)], _GOOD, _TWO, "0 bytes for 2 cells"),
        (2, [(2, 0)], [(0, 0), (0, 12), (16, 9)], _TWO, "9 bytes at 16 of a body of 24"),
        (2, [(2, 0)], [(0, 0), (-8, 12), (16, 2)], _TWO, "12 bytes at -8"),
        (2, [(2, 0)], [(0, 0), (0, 12), (16, 1)], _TWO, "to 2 in 1 bytes"),
        (2, [(2, 0)], _GOOD, struct.pack("<3i4x", 0, 2, 1) + bytes(8), "not in order"),
        (2, [(2, 0)], _GOOD, struct.pack("<3i4x", -2, -1, 0) + bytes(8), "not in order"),
    ],
)
def test_a_record_batch_that_lies_is_refused(
    length: int, nodes: list[tuple[int, int]], buffers: list[tuple[int, int]], body: bytes, words: str
) -> None:
    schema = schema_message([Field("value", Type.BINARY)])
    honest: list[Any] = [schema, record_batch_message(2, [(2, 0)], _GOOD, len(_TWO)), _TWO, END]
    assert [rows.values for rows in read_stream(b"".join(honest))] == [[b"a", b"b"]]

    lying: list[Any] = [schema, record_batch_message(length, nodes, buffers, len(body)), body, END]
    with pytest.raises(BatchError, match=words) as caught:
        list(read_stream(b"".join(lying)))
    assert caught.value.code == "malformed"


def test_text_that_goes_out_is_utf8() -> None:
    """Arrow believes text: a tag that is none stops the batch on our side, not in a reader's table."""
    frame = bytearray(build([b"a", b"b"], tags=["ü", None]))
    entry = Batch(frame).entry(Column.TAG)
    assert entry is not None
    frame[entry.position] = 0xFF
    batch = Batch(frame, verified=True)

    for go in (lambda: write_stream([batch]), lambda: to_arrow(batch)):
        with pytest.raises(BatchError, match="records 0 to 1 cannot be read"):
            go()


@given(st.data())
@settings(max_examples=1000)
def test_a_mangled_stream_raises_nothing_but_batch_errors(data: st.DataObject) -> None:
    """Arrow has no checksums, so damage may pass; but nothing is read outside, and nothing else is raised."""
    stream = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        for rows in read_stream(stream):
            assert len(rows) < 1000
    except BatchError as error:
        assert error.code in {"malformed", "unsupported"}


@pytest.mark.parametrize(
    ("form", "value"),
    [
        *(("<I", value) for value in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)),
        *(("<Q", value) for value in (2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)),
    ],
)
def test_no_number_in_the_metadata_makes_us_read_far(form: str, value: int) -> None:
    """Every four, and every eight bytes of the stream, set to small and huge numbers.

    A buffer of 2^63 - 1 bytes ends a process that reads the stream by nanoarrow (docs/decisions/0018).
    """
    original = sample()
    size = struct.calcsize(form)
    for position in range(0, len(original) - size + 1, size):
        stream = bytearray(original)
        struct.pack_into(form, stream, position, value)
        try:
            list(read_stream(stream))
        except BatchError:
            pass


def test_an_empty_stream_is_no_stream() -> None:
    for stream in (b"", END):
        with pytest.raises(BatchError, match="no schema"):
            list(read_stream(stream))


def test_record_batches_without_records_are_left_out() -> None:
    table = pyarrow.table({"value": pyarrow.array([], pyarrow.binary())})
    batch = pyarrow.record_batch({"value": pyarrow.array([], pyarrow.binary())})
    assert list(read_stream(arrow_stream(table))) == []
    assert list(read_stream(arrow_stream(batch))) == []
