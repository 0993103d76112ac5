"""The limits of one append request."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one append request: bytes of the body and of the parts of a record, number of records."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_record_bytes: int = 8 * 1024 * 1024
    max_records: int = 100_000
    max_key_bytes: int = 64 * 1024
    max_tag_bytes: int = 255
    max_headers_bytes: int = 64 * 1024
