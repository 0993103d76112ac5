"""What tells a batch of the sink from others, so that none is taken for one that was committed before.

Spark runs a batch again when it crashed between the sink's commit and its own: the sink knows its number, and
does not write it twice. But a checkpoint that was put back to an older state counts from there again, and its
batches are new. Those below the last committed number are refused; under that number itself the fingerprint
decides, which the cluster keeps with each decision.

Spark writes down what a batch reads before it runs it, and never changes that: the digest of this file is the
batch. Where a task of Python's can't read the checkpoint, the number of records stands for it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from typing import Final

from laminar.client.records import SinkInfo

log = logging.getLogger(__name__)

_FORM: Final = re.compile(r"records=(\d+)(?: journal=([0-9a-f]+))?")


class OtherBatch(ValueError):
    """What is committed under a batch's number is not this batch: nothing of it was written."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one batch: its records, and the digest of Spark's journal of it, if it can be read."""

    records: int
    journal: str | None = None

    def __str__(self) -> str:
        return f"records={self.records}" + (f" journal={self.journal}" if self.journal else "")

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """What `str` gave; None for another text, as of a commit that others made."""
        found = _FORM.fullmatch(text)
        return None if found is None else cls(int(found[1]), found[2])

    def is_of(self, other: Fingerprint) -> bool:
        """Whether both may be of one batch: by the journal, or else the number of records.

        A query that is not deterministic may have other records when it is run again, under one journal.
        """
        if self.journal is not None and other.journal is not None:
            return self.journal == other.journal
        return self.records == other.records


def journal_of(checkpoint: str | None, number: int) -> str | None:
    """The digest of what Spark has journaled of a batch, in the driver; None where it can't be read."""
    if checkpoint is None:
        return None
    from pyarrow import ArrowException, fs

    try:
        files, folder = fs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", checkpoint))
    except (ArrowException, OSError):
        # A relative path is no URI; an unknown scheme is one of a file system that only Spark knows.
        if ":" in checkpoint:
            return None
        files, folder = fs.LocalFileSystem(), checkpoint
    try:
        with files.open_input_stream(f"{folder.rstrip('/')}/offsets/{number}") as journal:
            return hashlib.sha256(journal.read()).hexdigest()[:32]
    except (ArrowException, OSError) as error:
        log.info("the journal of batch %d in %s is not read: %s", number, checkpoint, error)
        return None


def committed_before(known: SinkInfo, number: int, fingerprint: Fingerprint) -> None:
    """Batch `number` is committed, as `known` tells: it is not written again. OtherBatch if it is another."""
    if known.committed is not None and known.committed > number:
        raise older_than_its_sink(known.sink, number, known.committed)
    other = Fingerprint.parse(known.fingerprint)
    if other is not None and not fingerprint.is_of(other):
        raise OtherBatch(
            f"sink {known.sink!r} has committed batch {number} with {other.records} records, and it was"
            f" another than this one, with {fingerprint.records}: nothing of this one is written. {_HOW}"
        )
    log.warning(
        "batch %d of sink %s was committed before: its %d records are not written again",
        number,
        known.sink,
        fingerprint.records,
    )


def older_than_its_sink(sink: str, number: int, committed: int) -> OtherBatch:
    """Batch `number` comes after a later one was committed."""
    return OtherBatch(
        f"batch {number} is below the last that sink {sink!r} has committed, {committed}: nobody can tell"
        f" whether it is written already, and nothing of it is written now. {_HOW}"
    )


_HOW: Final = (
    "Was the checkpoint put back to an older state, or is txnAppId used for something else? Go on with a"
    " checkpoint or txnAppId of its own, from where the target ends"
)
