"""Batches: records in columns behind a header, the unit of append, replication, storage and fetch.

This package exports everything that a user of batches needs. `header` is the first 128 bytes and their
checksums, `columns` the body; `builder` makes batches, `batch` reads them, `validation` checks those of
clients. The encoded bytes of a batch are a *frame*. `docs/format.md` has every byte.
"""

from __future__ import annotations

from laminar.batch.batch import Batch, Record
from laminar.batch.builder import build, merge, mergeable
from laminar.batch.columns import (
    MAX_TIME_MS,
    Codec,
    Column,
    Entry,
    has_column,
    read_directory,
    tag_bit,
    tag_hash,
)
from laminar.batch.header import (
    BATCH_TYPE,
    HEADER_SIZE,
    MAGIC,
    MAX_FRAME_BYTES,
    NO_PRODUCER,
    BatchError,
    Buffer,
    Flag,
    Header,
    Kind,
    SplitFrame,
    as_due,
    as_large,
    as_published,
    as_staged,
    body_of,
    build_control,
    build_part,
    header_of,
    kind_of,
    split,
    split_headers,
    stamp,
    term_of,
    verify,
    verify_header,
    whole,
)
from laminar.batch.single_value import verified_value
from laminar.batch.validation import CellLimits, check_batch, check_directory, takes_long

__all__ = [
    "BATCH_TYPE",
    "HEADER_SIZE",
    "MAGIC",
    "MAX_FRAME_BYTES",
    "MAX_TIME_MS",
    "NO_PRODUCER",
    "Batch",
    "BatchError",
    "Buffer",
    "CellLimits",
    "Codec",
    "Column",
    "Entry",
    "Flag",
    "Header",
    "Kind",
    "Record",
    "SplitFrame",
    "as_due",
    "as_large",
    "as_published",
    "as_staged",
    "body_of",
    "build",
    "build_control",
    "build_part",
    "check_batch",
    "check_directory",
    "has_column",
    "header_of",
    "kind_of",
    "merge",
    "mergeable",
    "read_directory",
    "split",
    "split_headers",
    "stamp",
    "tag_bit",
    "tag_hash",
    "takes_long",
    "term_of",
    "verified_value",
    "verify",
    "verify_header",
    "whole",
]
