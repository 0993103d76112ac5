"""A key index file: what is looked up is what was added, wherever it lies; damage is never an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.log import RealDisk
from laminar.log.key_index import writer as writer_module
from laminar.log.key_index.layout import HEAD_BYTES, PAGE_BYTES, Covered, KeyIndexError
from laminar.log.key_index.lookup import KeyIndex
from laminar.log.key_index.writer import KeyIndexWriter

BASE = 1_000_000
COVERED = Covered(7, 100, 200, 3, BASE, BASE + 100_000, 1 << 20)
Added = dict[str, dict[bytes, list[int]]]


def written(path: Path, batches: dict[str, list[tuple[int, set[bytes]]]]) -> int:
    """Write an index; return its bytes. `batches` has, by section, each batch's offset and hashes."""
    file = RealDisk().open(str(path), create=True)
    writer = KeyIndexWriter(file, COVERED, list(batches))
    for name, offset, digests in sorted(
        ((name, offset, digests) for name, each in batches.items() for offset, digests in each),
        key=lambda row: row[1],
    ):
        assert writer.add(name, digests, offset) == len(digests)
    return writer.finish()


def opened(path: Path) -> KeyIndex:
    return KeyIndex(RealDisk().open(str(path)))


def all_following(index: KeyIndex, name: str, digest: bytes, offset: int) -> Iterator[int]:
    more = True
    while more:
        found, more = index.following(name, digest, offset)
        assert found or not more
        yield from found
        offset = found[-1] + 1 if found else offset


def all_preceding(index: KeyIndex, name: str, digest: bytes, offset: int) -> Iterator[int]:
    more = True
    while more:
        found, more = index.preceding(name, digest, offset)
        yield from found
        offset = found[-1] if found else offset


@pytest.mark.parametrize("seed", range(4))
def test_what_is_looked_up_is_what_was_added(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few hashes and many, close together and far apart, in one block and in several."""
    rng = random.Random(seed)
    monkeypatch.setattr(writer_module, "BLOCK_ENTRIES", rng.choice([500, 5_000, 1 << 20]))
    monkeypatch.setattr(writer_module, "PAGE_ENTRIES", rng.choice([2, 50, 340]))
    near = [b"\x80" + bytes(5) + n.to_bytes(2, "big") for n in range(50)]
    far = [rng.randbytes(8) for _ in range(1_000)]
    ends = [bytes(8), b"\xff" * 8]
    everywhere = rng.choice([*near, *ends])
    batches: dict[str, list[tuple[int, set[bytes]]]] = {"key": [], "header:n": [], "none": []}
    offset = BASE
    for _ in range(800):
        batches["key"].append((offset, {everywhere, *rng.sample(far, 3), rng.choice(near)}))
        if rng.random() < 0.1:
            batches["header:n"].append((offset, {rng.choice(ends)}))
        offset += rng.choice([1, 1, 40])
    assert written(tmp_path / "a.find", batches) == (tmp_path / "a.find").stat().st_size

    index = opened(tmp_path / "a.find")
    index.check()
    assert index.covered == COVERED and index.names == ("key", "header:n", "none")
    for name, digest in [
        *(
            ("key", each)
            for each in (everywhere, *rng.sample(near, 5), *rng.sample(far, 20), rng.randbytes(8))
        ),
        *(("header:n", each) for each in ends),
        ("none", far[0]),
    ]:
        added = [at for at, digests in batches[name] if digest in digests]
        for at in (BASE, rng.randrange(BASE, offset), rng.choice(added or [BASE]), offset + 10):
            assert list(all_following(index, name, digest, at)) == [each for each in added if each >= at]
            assert list(all_preceding(index, name, digest, at)) == [each for each in added[::-1] if each < at]


def test_a_lookup_reads_about_two_pages(tmp_path: Path) -> None:
    """Of thirty thousand entries, beside the head."""
    rng = random.Random(1)
    digests = [rng.randbytes(8) for _ in range(30_000)]
    written(tmp_path / "a.find", {"key": [(BASE + n, {each}) for n, each in enumerate(digests)]})
    pages = 0
    for n in range(0, 30_000, 500):
        index = opened(tmp_path / "a.find")
        assert index.following("key", digests[n], BASE)[0] == [BASE + n]
        pages += (index.bytes_read - HEAD_BYTES) // PAGE_BYTES
    assert pages <= 120


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    """Of any used byte, by who reads it; of a file that was cut or is of zeros, too."""
    path = tmp_path / "a.find"
    size = written(path, {"key": [(BASE + n, {n.to_bytes(8, "big")}) for n in range(1_000)]})
    whole = path.read_bytes()
    head = len(whole[:HEAD_BYTES].rstrip(b"\0"))
    rng = random.Random(1)
    for at in [0, 5, head - 1, HEAD_BYTES, size - 1, *(rng.randrange(HEAD_BYTES, size) for _ in range(20))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(KeyIndexError):
            opened(path).check()
    pages = [whole[at : at + PAGE_BYTES] for at in range(HEAD_BYTES, size, PAGE_BYTES)]
    swapped = b"".join([whole[:HEAD_BYTES], pages[1], pages[0], *pages[2:]])
    for data in (b"", whole[:100], whole[:HEAD_BYTES], whole[: size - 1], bytes(size), swapped):
        path.write_bytes(data)
        with pytest.raises(KeyIndexError):
            opened(path).check()


def test_a_file_is_none_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head comes last: what was written until then is not taken for an index."""
    monkeypatch.setattr(writer_module, "BLOCK_ENTRIES", 10)
    path = tmp_path / "a.find"
    writer = KeyIndexWriter(RealDisk().open(str(path), create=True), COVERED, ["key"])
    for n in range(100):
        writer.add("key", [n.to_bytes(8, "big")], BASE + n)
    assert path.stat().st_size > HEAD_BYTES
    with pytest.raises(KeyIndexError):
        opened(path)
    writer.finish()
    opened(path).check()


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets too far away, names too long, blocks too many: such a segment is scanned."""
    file = RealDisk().open(str(tmp_path / "a.find"), create=True)
    with pytest.raises(KeyIndexError, match="from the segment's first"):
        KeyIndexWriter(file, COVERED, ["key"]).add("key", [bytes(8)], BASE + (1 << 32))
    with pytest.raises(KeyIndexError, match="name"):
        KeyIndexWriter(file, COVERED, ["k" * 600]).finish()
    monkeypatch.setattr(writer_module, "BLOCK_ENTRIES", 1)
    monkeypatch.setattr(writer_module, "MAX_BLOCKS", 10)
    writer = KeyIndexWriter(file, COVERED, ["key"])
    with pytest.raises(KeyIndexError, match="blocks"):
        for n in range(20):
            writer.add("key", [bytes(8)], BASE + n)
