"""A batch is known again, and no other is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.client.descriptions import SinkInfo
from laminar.spark.write.fingerprints import Fingerprint, OtherBatch, committed_before, journal_of

pytest.importorskip("pyarrow")


def test_the_journal_tells_batches_apart_where_it_is_known() -> None:
    """A query that is not deterministic has other records under one journal; else their number decides."""
    assert Fingerprint(5, "aa").is_of(Fingerprint(7, "aa"))
    assert not Fingerprint(5, "aa").is_of(Fingerprint(5, "bb"))
    assert Fingerprint(5).is_of(Fingerprint(5, "bb"))
    assert not Fingerprint(5).is_of(Fingerprint(6, "bb"))


@pytest.mark.parametrize("fingerprint", [Fingerprint(5, "aa"), Fingerprint(0)])
def test_a_fingerprint_survives_the_cluster(fingerprint: Fingerprint) -> None:
    """It is kept as text; a text of others is none."""
    assert fingerprint == Fingerprint.parse(str(fingerprint))
    assert Fingerprint.parse("batch 7 of them") is None is Fingerprint.parse("")


def test_the_journal_is_read_where_spark_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path, a relative one, or a URI; what can't be read is not known."""
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "7").write_text("v1")
    (offsets / "8").write_text("v2")
    monkeypatch.chdir(tmp_path)
    known = journal_of(str(tmp_path / "checkpoint"), 7)

    assert known is not None
    assert known == journal_of("checkpoint", 7) == journal_of((tmp_path / "checkpoint").as_uri() + "/", 7)
    assert known != journal_of("checkpoint", 8)
    assert None is journal_of("checkpoint", 9) is journal_of(None, 7) is journal_of("dbfs:/checkpoint", 7)


def test_what_was_committed_before_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """With its records: nothing is dropped in silence. Another batch, or an older one, is an error."""
    known = SinkInfo("s", 1, 7, publishing=False, fingerprint="records=5 journal=aa")

    committed_before(known, 7, Fingerprint(5, "aa"))
    assert "batch 7 of sink s was committed before: its 5 records are not written again" in caplog.text
    with pytest.raises(OtherBatch, match="another batch 7, with 5 records; this one, with 6, is not written"):
        committed_before(known, 7, Fingerprint(6, "bb"))
    with pytest.raises(OtherBatch, match="batch 6 is below the last"):
        committed_before(known, 6, Fingerprint(5, "aa"))
