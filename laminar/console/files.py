"""The files of the console, read into a dictionary: as they are sent, whole and compressed.

Only what is in the dictionary is served: a path that a request names is a key, and never reaches a disk.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final, NamedTuple

INDEX: Final = "index.html"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""The policy of each file: what comes from elsewhere, or stands in the page itself, does not run."""

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


class ConsoleFile(NamedTuple):
    """A file: its media type, its bytes, the same compressed with gzip, and a digest of them."""

    media_type: str
    body: bytes
    gzipped: bytes
    digest: str


@cache
def console_files() -> MappingProxyType[str, ConsoleFile]:
    """Return all files of the console by name."""
    found = {}
    for path in resources.files(__package__).joinpath("web").iterdir():
        _, _, ending = path.name.rpartition(".")
        if ending in _TYPES:
            body = path.read_bytes()
            digest = hashlib.sha256(body).hexdigest()[:32]
            found[path.name] = ConsoleFile(_TYPES[ending], body, gzip.compress(body, 6, mtime=0), digest)
    return MappingProxyType(found)
