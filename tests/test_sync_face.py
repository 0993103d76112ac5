"""The sync face is what its generator makes of the asynchronous one (`make check`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sync_face

TWIN = '''
class Topic:
    def __repr__(self) -> str: ...
    async def __aenter__(self): ...
    async def append(self, value: bytes, *, timeout: float | None = None) -> Receipt:
        """Append: ``async with topic`` and ``await topic.append(b"x")``."""
    def read(self, start: str = "earliest") -> Reader[bytes]:
        """Read."""
    async def open_sender(self) -> None: ...
    async def close(self) -> None: ...
    @property
    def ends(self) -> dict[int, int]: ...
'''
OWN = '''class Topic:
    def __init__(self, portal, topic):
        self._portal, self._twin = portal, topic

    def close(self) -> None:
        """By hand."""

    # generated from twin.Topic, without open_sender

    def gone(self) -> None: ...


AFTER = 1
'''


def test_the_sync_face_is_as_it_is_generated() -> None:
    """After a change of the asynchronous face: `python -m tests.sync_face`."""
    assert [] == list(sync_face.stale())


def test_each_mark_is_understood() -> None:
    """A class with another one would be left as it is, and nobody would notice."""
    for file in sync_face.FOLDER.glob("*.py"):
        text = file.read_text()
        assert text.count("\n    # generated from") == len(sync_face.MARK.findall(text)), file.name


@pytest.mark.parametrize("between", [" ", "\n    # "])
def test_what_is_generated_calls_the_twin_on_its_loop(
    between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docs without what only a loop has, twins wrapped, and nothing twice that is written by hand."""
    (tmp_path / "twin.py").write_text(TWIN)
    monkeypatch.setattr(sync_face, "ROOT", tmp_path)
    made = sync_face.generated(OWN.replace(", without", f",{between}without"))

    assert made == sync_face.generated(made)
    assert "return Reader(self._portal, self._twin.read(start))" in made
    assert "return self._portal.run(lambda: self._twin.append(value, timeout=timeout))" in made
    assert '"""Append: ``with topic`` and ``topic.append(b"x")``."""' in made
    assert "return self._twin.ends" in made
    assert 1 == made.count("def close(") == made.count("def __enter__(") == made.count("def __repr__(")
    assert "open_sender" not in made.partition("\n    def __repr__")[2]
    assert "gone" not in made
    assert made.endswith("\n\nAFTER = 1\n")
