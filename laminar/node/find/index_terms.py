"""The terms of a topic's key index: the setting `index`, the hashes of a batch, the hashes of a search.

A term is a kind of value that is indexed: `key`, `trace_id` or `header:NAME`. Each has a section in the file.
The hash is the first 8 bytes of MurmurHash3 x64 128 of the value's bytes, seed 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

import mmh3

from laminar.batch import Batch
from laminar.log.key_index.layout import HASH_BYTES, MAX_SECTIONS
from laminar.node.find.where import Where, let_others_run

DEFAULT: Final = "key,trace_id"
"""The setting `index` of a topic that has none."""
_HEADER: Final = "header:"
_TERMS: Final = ("key", "trace_id")
_VALUES_AT_ONCE: Final = 2_000
"""After hashing this many values another thread may run."""


@lru_cache(maxsize=1024)
def terms_of(setting: str) -> tuple[str, ...]:
    """Return the terms that the setting `index` names, each once, in its order; none if it is empty.

    Terms of a newer program, which this one does not know, are left out.
    """
    known = (term for term in setting.split(",") if term in _TERMS or term.startswith(_HEADER))
    return tuple(dict.fromkeys(known))[:MAX_SECTIONS]


def setting_of(settings: Mapping[str, int | str]) -> str:
    """Return a topic's setting `index`: the terms to be indexed, as text separated by commas."""
    return str(settings.get("index", DEFAULT))


def digest_of(value: bytes) -> bytes:
    """Return the hash of a value (8 bytes), as it is in key indexes."""
    return mmh3.mmh3_x64_128_digest(value, 0)[:HASH_BYTES]


def asked_of(where: Where) -> list[tuple[str, bytes]]:
    """Return the terms that a search's conditions name, each with the hash of the wanted value."""
    found: list[tuple[str, bytes]] = []
    if where.trace_id is not None:
        found.append(("trace_id", digest_of(where.trace_id)))
    if where.key is not None:
        found.append(("key", digest_of(where.key)))
    found += [(f"{_HEADER}{name}", digest_of(value)) for name, value in where.headers.items()]
    return found


def digests_of(batch: Batch, term: str) -> set[bytes]:
    """Return the set of hashes of the values of a term in a batch.

    Raises:
        BatchError: the values cannot be read.
    """
    found: set[bytes] = set()
    since = 0
    for value in set(_values_of(batch, term)):
        found.add(digest_of(value))
        since += 1
        if since == _VALUES_AT_ONCE:
            since = 0
            let_others_run()
    return found


def _values_of(batch: Batch, term: str) -> Iterator[bytes] | Iterable[bytes]:
    if term.startswith(_HEADER):
        name = term.removeprefix(_HEADER)
        return (headers[name] for headers in batch.headers or () if name in headers)
    values = batch.keys if term == "key" else batch.trace_ids
    return (value for value in values or () if value is not None)
