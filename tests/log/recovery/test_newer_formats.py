"""Files that a newer program wrote are refused as such: never taken for damage, and never changed."""

from __future__ import annotations

import pytest

from laminar.log.commit import end_mark
from laminar.log.disk import document
from laminar.log.disk.errors import DamagedDocument, NewerFormat
from laminar.log.format import journal_codec
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, History, open_inline, run


def _everything(disk: FaultDisk) -> dict[str, bytes]:
    """Return each file of the store directory with its bytes.

    Without the manifest, which each start writes again, as it is, before it relies on it.
    """
    found = {}
    for name in (name for name in disk.list(HOME) if not name.startswith("manifest")):
        file = disk.open(f"{HOME}/{name}")
        found[name] = bytes(file.pread(file.size(), 0))
        file.close()
    return found


@pytest.mark.parametrize(
    ("module", "constant", "file"),
    [
        (document, "_VERSION", "checkpoint"),
        (journal_codec, "VERSION", "journal-"),
    ],
)
def test_a_store_of_a_newer_program_is_refused_unchanged(
    monkeypatch: pytest.MonkeyPatch, module: object, constant: str, file: str
) -> None:
    """Taken for damage, its entries would be forgotten, and the replicas in it given up."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"old", term=1)
        await history.sync()
        with monkeypatch.context() as newer:
            newer.setattr(module, constant, 2)
            history.write(1, b"new", term=1)
            await history.sync()
            if module is document:
                await history.storage.checkpoint()
        disk.kill()
        before = _everything(disk)

        with pytest.raises(NewerFormat, match=rf"{file}.* has format version 2, .* versions up to 1"):
            open_inline(disk)

        assert before == _everything(disk)

    run(main())


def test_an_end_mark_of_a_newer_program_is_refused_and_a_rotten_one_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, what is missing at the end of the journal would not be missed."""
    end = end_mark.End(generation=1, seed=2, lsn=3, durable_lsn=3, hard_state_lsn=0)
    rotten = bytearray(end.encode())
    rotten[4] = 2
    assert end_mark.decode_end(rotten) is None
    with monkeypatch.context() as newer:
        newer.setattr(end_mark, "_VERSION", 2)
        mark = end.encode()
        assert end == end_mark.decode_end(mark)

    with pytest.raises(NewerFormat, match=r"end-mark has format version 2, .* versions up to 1"):
        end_mark.decode_end(mark)


def test_rot_in_the_byte_of_a_version_is_damage() -> None:
    """No newer program is asked for: the other copy is read, and without one the document is damaged."""
    disk = FaultDisk()
    disk.make_directory("d")
    thing = document.Document(disk, "d", "thing")
    thing.write(b"payload")
    disk.rot("d/thing-1.a", 4)
    assert b"payload" == thing.read()
    disk.rot("d/thing-1.b", 4)
    with pytest.raises(DamagedDocument):
        thing.read()
