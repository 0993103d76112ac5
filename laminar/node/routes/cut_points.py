"""The choice of the points at which a partition is split, so that its parts get about the same bytes.

The partition's leader takes a sample of its newest records with keys, so a range of keys that has grown
lately is cut, whatever the rest of the log holds. The keys of one logical partition cannot be divided: if all
records belong to one logical partition, the cut is made beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence

from laminar.batch import Batch, BatchError, Buffer
from laminar.wire.key_route import logical_of_key

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
MOST_BYTES = 16 * 1024 * 1024
NEWEST = 4
"""The samples are of the newest quarter of the records."""

Frames = Callable[[int, int], Awaitable[Sequence[Buffer]]]


async def sample(frames: Frames, *, start: int, end: int) -> list[Buffer]:
    """Return batches of the newest quarter of the offsets from `start` to `end`, evenly spread.

    `frames(offset, max_bytes)` reads batches from an offset on.
    """
    first = end - (end - start) // NEWEST
    found: list[Buffer] = []
    size = 0
    for number in range(SAMPLES):
        offset = first + (end - first) * number // SAMPLES
        if offset >= end or size >= MOST_BYTES:
            break
        read = await frames(offset, SAMPLE_BYTES)
        found += read
        size += sum(map(len, read))
    return found


def weights_of(frames: Sequence[Buffer]) -> dict[int, int]:
    """Return, by logical partition, the bytes (keys and values) of its records with keys in these batches."""
    weights: dict[int, int] = {}
    for frame in frames:
        try:
            batch = Batch(frame)
            keys = batch.keys
            values = batch.values if keys is not None else []
        except BatchError:  # an unreadable batch is no reason not to split
            continue
        for key, value in zip(keys or (), values, strict=True):
            if key is not None:
                logical = logical_of_key(key)
                weights[logical] = weights.get(logical, 0) + len(key) + len(value)
    return weights


def cuts_of(weights: dict[int, int], *, first: int, size: int, into: int) -> list[int]:
    """Return where to cut a range of logical partitions into `into` parts of about the same weight.

    The range is `size` logical partitions from `first` on; a cut is the first logical partition of a part but
    the first one. Without weights the parts have about the same number of logical partitions. Each part has
    at least one.
    """
    inside = sorted(
        (logical, weight) for logical, weight in weights.items() if first <= logical < first + size
    )
    total = sum(weight for _, weight in inside)
    cuts: list[int] = []
    passed, place = 0, 0
    for part in range(1, into):
        cut = first + size * part // into
        if total:
            while place < len(inside) and (passed + inside[place][1] / 2) * into <= total * part:
                passed += inside[place][1]
                place += 1
            if place < len(inside):
                cut = inside[place][0]
        # Room for a part before it, and for each that follows.
        low = (cuts[-1] if cuts else first) + 1
        cuts.append(min(max(cut, low), first + size - (into - part)))
    return cuts


def heaviest_part(weights: dict[int, int], *, first: int, size: int, cuts: Sequence[int]) -> float:
    """Return the heaviest part's share (0 to 1) of the range's weight, if cut so; 0.0 without weights."""
    parts = [0] * (len(cuts) + 1)
    for logical, weight in weights.items():
        if first <= logical < first + size:
            parts[bisect_right(cuts, logical)] += weight
    return max(parts) / (sum(parts) or 1)
