"""Fingerprints of batches: they show whether a batch is the one that was committed under its number.

Spark runs a batch again when it crashed between the sink's commit and its own. The sink knows the number and
does not write the batch twice. But after a restore of an older checkpoint Spark uses numbers again for other
batches. Those below the last committed number are refused. For the last committed number itself the
fingerprints are compared: the cluster keeps that of the committed batch with its decision.

Before Spark runs a batch, it writes the offsets that the batch reads into a file of its journal
(``offsets/N`` in the checkpoint), and never changes that file. So the file's digest identifies the batch.
Where Python cannot read the checkpoint, only the number of records is compared.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from typing import Final

from laminar.client.descriptions import SinkInfo

log = logging.getLogger(__name__)

_FORM: Final = re.compile(r"records=(\d+)(?: journal=([0-9a-f]+))?")


class OtherBatch(ValueError):
    """Another batch is committed under this batch's number: nothing of this one was written."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprint of one batch: its number of records, and the digest of its file in Spark's journal.

    `journal` is None where that file cannot be read.
    """

    records: int
    journal: str | None = None

    def __str__(self) -> str:
        return f"records={self.records}" + (f" journal={self.journal}" if self.journal else "")

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """Return the fingerprint in a text made by `str(fingerprint)`; None for another program's text."""
        found = _FORM.fullmatch(text)
        return None if found is None else cls(int(found[1]), found[2])

    def is_of(self, other: Fingerprint) -> bool:
        """Return whether both may be fingerprints of one batch.

        If both have the journal's digest, that alone decides: a query that is not deterministic may have
        another number of records when its batch runs again. Otherwise the numbers of records are compared.
        """
        if self.journal is not None and other.journal is not None:
            return self.journal == other.journal
        return self.records == other.records


def journal_of(checkpoint: str | None, number: int) -> str | None:
    """Return the digest of the file of batch `number` in Spark's journal; None if it cannot be read.

    `checkpoint` is the query's checkpoint folder, a path or URI; None gives None. Runs in the driver.
    """
    if checkpoint is None:
        return None
    from pyarrow import ArrowException, fs

    try:
        files, folder = fs.FileSystem.from_uri(re.sub(r"^s3[an]://", "s3://", checkpoint))
    except (ArrowException, OSError):
        # A relative path is no URI. An unknown scheme names a file system that only Spark can read.
        if ":" in checkpoint:
            return None
        files, folder = fs.LocalFileSystem(), checkpoint
    try:
        with files.open_input_stream(f"{folder.rstrip('/')}/offsets/{number}") as journal:
            return hashlib.sha256(journal.read()).hexdigest()[:32]
    except (ArrowException, OSError) as error:
        log.info("the journal of batch %d in %s cannot be read: %s", number, checkpoint, error)
        return None


def committed_before(known: SinkInfo, number: int, fingerprint: Fingerprint) -> None:
    """Check that the sink's committed batch `number` is the batch of `fingerprint`, and log a warning.

    The warning says that the batch is not written again. A batch that another program committed, whose
    fingerprint has another form, counts as the same.

    Raises:
        OtherBatch: when it is another batch, or when a later one is committed.
    """
    if known.committed is not None and known.committed > number:
        raise older_than_its_sink(known.sink, number, known.committed)
    other = Fingerprint.parse(known.fingerprint)
    if other is not None and not fingerprint.is_of(other):
        raise OtherBatch(
            f"sink {known.sink!r} has committed another batch {number}, with {other.records} records; this"
            f" one, with {fingerprint.records}, is not written. {_HOW}"
        )
    log.warning(
        "batch %d of sink %s was committed before: its %d records are not written again",
        number,
        known.sink,
        fingerprint.records,
    )


def older_than_its_sink(sink: str, number: int, committed: int) -> OtherBatch:
    """Return the error for a batch whose `number` is below `committed`, the last of its sink."""
    return OtherBatch(
        f"batch {number} is below the last that sink {sink!r} has committed, {committed}. Whether it was"
        f" written is unknown, and nothing of it is written now. {_HOW}"
    )


_HOW: Final = (
    "Was the checkpoint restored to an older state, or is txnAppId used by another job? Continue with a new"
    " checkpoint or txnAppId, from where the target ends"
)
