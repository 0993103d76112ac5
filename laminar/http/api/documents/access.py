"""Documents about access: tokens and certificates, their grants, limits, and the principal of a request."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.shared import Answer, Count, Request, Time
from laminar.http.api.names import TOPIC_PATTERN
from laminar.http.api.parameters import MAX_NUMBER
from laminar.http.api.roles import Role

MAX_GRANTS: Final = 64
MAX_SUBJECT: Final = 1_000
PREFIX_PATTERN: Final = r"[A-Za-z0-9._-]{0,200}"


class NewGrant(Request):
    """A permission to give to a new token: `role` on every name that begins with `prefix`.

    An empty prefix stands for every name.
    """

    role: Role
    prefix: Annotated[str, Meta(pattern=f"^{PREFIX_PATTERN}\\Z")] = ""


class NewToken(Request):
    """Request to create a token of the principal `name`. A principal may have several tokens, all valid.

    With `certificate`, the subject name of a client certificate, no token is created: that certificate proves
    the principal.
    """

    name: Annotated[str, Meta(pattern=f"^{TOPIC_PATTERN}\\Z")]
    grants: Annotated[list[NewGrant], Meta(min_length=1, max_length=MAX_GRANTS)]
    expires: Time | None = None
    certificate: Annotated[str, Meta(min_length=1, max_length=MAX_SUBJECT)] | None = None


class Grant(Answer):
    """A permission of a token: `role` on every name that begins with `prefix`; empty: on every name."""

    role: str
    prefix: str


class Token(Answer):
    """A token without its secret, or an accepted client certificate; `expires` is null if it never does."""

    id: str
    name: str
    grants: list[Grant]
    created: Time
    expires: Time | None
    certificate: str | None


class CreatedToken(Answer):
    """A new token: `token` is its text, which no later answer contains; null for a certificate."""

    token: str | None
    id: str
    name: str
    grants: list[Grant]
    created: Time
    expires: Time | None
    certificate: str | None


class Tokens(Answer):
    """All tokens and accepted certificates, in order of their names and times of creation."""

    tokens: list[Token]


Limit = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]


class NewLimits(Request):
    """Request to replace the limits of a principal; a limit that is left out is removed.

    Rates and connections are limited on each shard of a node by itself. Cursors, uploads, and the new
    producers and idempotency keys of an hour are limited in each partition; sinks and names of producers at
    each transaction coordinator.
    """

    requests_per_s: Limit | None = None
    bytes_in_per_s: Limit | None = None
    bytes_out_per_s: Limit | None = None
    connections: Limit | None = None
    topics: Limit | None = None
    partitions: Limit | None = None
    channels: Limit | None = None
    cursors: Limit | None = None
    sinks: Limit | None = None
    uploads: Limit | None = None
    producers: Limit | None = None


class Limits(Answer):
    """The limits of a principal; a member that is left out is unlimited."""

    requests_per_s: Limit | UnsetType = UNSET
    bytes_in_per_s: Limit | UnsetType = UNSET
    bytes_out_per_s: Limit | UnsetType = UNSET
    connections: Limit | UnsetType = UNSET
    topics: Limit | UnsetType = UNSET
    partitions: Limit | UnsetType = UNSET
    channels: Limit | UnsetType = UNSET
    cursors: Limit | UnsetType = UNSET
    sinks: Limit | UnsetType = UNSET
    uploads: Limit | UnsetType = UNSET
    producers: Limit | UnsetType = UNSET


class PrincipalLimits(Answer):
    """The limits that apply to a principal.

    With `version` 0 the principal has no limits of its own, and `limits` are those of `*`, the default.
    """

    principal: str
    limits: Limits
    version: Count


class AllLimits(Answer):
    """The limits of all principals that have limits of their own, by name.

    Those of `*` apply to every other principal.
    """

    principals: list[PrincipalLimits]


class Usage(Answer):
    """The numbers of topics, partitions, channels and connections that a principal has now."""

    topics: Count
    partitions: Count
    channels: Count
    connections: Count
    """Of the shard that answers."""


class WhoAmI(Answer):
    """The principal that sent the request, with its grants, its limits, and what it uses of them.

    It is `anonymous` if the node asks for no tokens.
    """

    principal: str
    grants: list[Grant]
    expires: Time | None
    limits: Limits
    usage: Usage | None
    """Null if nothing of it is limited."""


class DatagramKey(Answer):
    """The key with which the client of a token or certificate signs the datagrams by which it appends.

    `key` is in hexadecimal digits, and `credential` is the id of the token or certificate. If the node asks
    for no tokens, the key is null and the credential empty. `minute` is the present time in minutes since
    1970.
    """

    credential: str
    key: str | None
    minute: int
