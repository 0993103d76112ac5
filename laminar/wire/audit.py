"""Records of the audit: nodes write them into the topic `_audit`, and readers decode them.

The value of each record of that topic is one `AuditRecord` as JSON.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["call", "refused", "missed"]

NO_ANSWER = 0
"""The status of a call whose client left before its answer: it may have been carried out."""

DATAGRAM = "UDP"
"""The method of an append by datagram."""


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the audit; a reader ignores unknown members.

    Its `kind` is `call` (a request that needs the role admin, and its outcome), `refused` (an answer 401 or
    403), or `missed` (`count` records that a process could not write). No query, header or body is recorded.
    """

    kind: Kind
    time: str
    """When it ended, as in RFC 3339; of several alike the last."""
    node: str
    shard: int
    """The process that was asked: the number of its shard."""
    principal: str = ""
    """Who asked; `anonymous` where nothing proved it."""
    credential: str = ""
    """The id of the token that was shown; of one that was refused it proves nothing."""
    address: str = ""
    """Where the request came from, without the port."""
    method: str = ""
    """As in HTTP, or `UDP`: it came as a datagram."""
    path: str = ""
    """Of several alike one; a token in it is cut."""
    operation: str = ""
    """As in `/openapi.json`; empty if the request was refused before it was known."""
    subject: dict[str, str] = {}
    """The names in the path, such as `topic`, and `location`, what was made."""
    status: int = NO_ANSWER
    code: str = ""
    """The code of the problem that was answered; empty if none was."""
    count: int = 1
    """How many it stands for: more than one if they were alike."""
    first: str = ""
    """When the first of several was; empty for one."""
