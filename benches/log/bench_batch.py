"""The columnar batch against rows of struct, both in one run: what a record costs to encode and decode.

    python -m benches.log.bench_batch

The rows are what a queue in Python would write otherwise: per record a length, a time and the bytes,
packed and unpacked in a loop, with one CRC over all. Both sides end in bytes with a checksum and come back
as a list of values; the batch, where pyarrow is there, also as an Arrow array, set against the same loop
over rows. Figures are the best of several rounds, in nanoseconds a record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import perf_counter_ns

from crc32c import crc32c

from laminar.batch import Batch, build, merge, stamp, verify
from laminar.batch.arrow.pyarrow_out import to_arrow

RECORDS = 1000
_ROW = struct.Struct("<Iq")
_PLACE = {"index": 1, "term": 1, "prev_term": 0, "base_offset": 0, "append_time_ms": 0, "committed_index": 0}


def encode_rows(values: list[bytes]) -> bytes:
    """Length, time, bytes; record after record; then the CRC."""
    parts = []
    for value in values:
        parts.append(_ROW.pack(len(value), 0))
        parts.append(value)
    body = b"".join(parts)
    return body + struct.pack("<I", crc32c(body))


def decode_rows(frame: bytes) -> list[bytes]:
    """The values of `encode_rows`, after its CRC."""
    end = len(frame) - 4
    assert crc32c(memoryview(frame)[:end]) == struct.unpack_from("<I", frame, end)[0]
    values = []
    position = 0
    while position < end:
        length, _ = _ROW.unpack_from(frame, position)
        position += _ROW.size
        values.append(frame[position : position + length])
        position += length
    return values


def decode_batch(frame: bytes) -> list[bytes]:
    """The values of a frame, after its two CRCs."""
    return Batch(frame).values


def arrow_batch(frame: bytes) -> object:
    """The same values as an Arrow array, after the two CRCs and a check of all offsets; none is copied."""
    return to_arrow(Batch(frame), ["value"])


def _best_ns(call: Callable[[], object], *, calls: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = perf_counter_ns()
        for _ in range(calls):
            call()
        best = min(best, (perf_counter_ns() - begin) / calls)
    return best


def run(*, rounds: int = 7, calls: int = 50) -> dict[str, float]:
    """Nanoseconds a record (a frame, for what works on one as a whole), and the ratios to rows.

    A ratio above 1 means that the columnar batch is that many times faster.
    """
    found: dict[str, float] = {}

    def measure(name: str, call: Callable[[], object], per: int = 1) -> float:
        found[name] = _best_ns(call, calls=calls, rounds=rounds) / per
        return found[name]

    for size in (12, 100, 1024):
        values = [bytes([i % 256]) * size for i in range(RECORDS)]
        rows, frame = encode_rows(values), bytes(build(values))
        assert decode_rows(rows) == Batch(frame).values == values
        slow = measure(f"encode_rows_{size}", partial(encode_rows, values), RECORDS)
        fast = measure(f"encode_batch_{size}", partial(build, values), RECORDS)
        found[f"encode_ratio_{size}"] = slow / fast
        slow = measure(f"decode_rows_{size}", partial(decode_rows, rows), RECORDS)
        fast = measure(f"decode_batch_{size}", partial(decode_batch, frame), RECORDS)
        found[f"decode_ratio_{size}"] = slow / fast
        if find_spec("pyarrow"):
            fast = measure(f"arrow_batch_{size}", partial(arrow_batch, frame), RECORDS)
            found[f"arrow_ratio_{size}"] = slow / fast
    # What a broker does to a frame, whatever it holds; `frame` is the last one, of 1 MiB.
    single = build([b"x" * 100])
    measure("stamp_ns", lambda: stamp(single, **_PLACE))  # type: ignore[arg-type]
    measure("verify_100_ns", lambda: verify(single))
    measure("verify_1mib_ns", lambda: verify(frame))
    measure("build_single_ns", lambda: build([b"x" * 100]))
    measure("merge_single_ns", lambda: merge([single] * 300), 300)
    return found


def main() -> None:
    found = run()
    for size in (12, 100, 1024):
        for way, rival in (("encode", "encode"), ("decode", "decode"), ("arrow", "decode")):
            if f"{way}_ratio_{size}" in found:
                rows, batch = found[f"{rival}_rows_{size}"], found[f"{way}_batch_{size}"]
                ratio = found[f"{way}_ratio_{size}"]
                print(f"{way} {size:>5} B: rows {rows:6.1f}, batch {batch:6.1f} ns a record: {ratio:.1f} x")
    for name in ("stamp_ns", "verify_100_ns", "verify_1mib_ns", "build_single_ns", "merge_single_ns"):
        print(f"{name.removesuffix('_ns'):>16}: {found[name]:8.0f} ns a frame")


if __name__ == "__main__":
    main()
