"""Who may do what: tokens and certificates, their grants, and the principal of a request."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from laminar.http.api.documents.shared import Answer, Request, Time
from laminar.http.api.names import TOPIC_PATTERN
from laminar.http.api.roles import Role

MAX_GRANTS: Final = 64
MAX_SUBJECT: Final = 1_000
PREFIX_PATTERN: Final = r"[A-Za-z0-9._-]{0,200}"


class NewGrant(Request):
    """A role on every name that begins with `prefix`; the empty prefix: on everything."""

    role: Role
    prefix: Annotated[str, Meta(pattern=f"^{PREFIX_PATTERN}\\Z")] = ""


class NewToken(Request):
    """A token that is to be made, for the principal `name`; of several tokens of a name each holds.

    With `certificate`, the subject name of a client certificate, no token is made: that certificate proves
    the principal.
    """

    name: Annotated[str, Meta(pattern=f"^{TOPIC_PATTERN}\\Z")]
    grants: Annotated[list[NewGrant], Meta(min_length=1, max_length=MAX_GRANTS)]
    expires: Time | None = None
    certificate: Annotated[str, Meta(min_length=1, max_length=MAX_SUBJECT)] | None = None


class Grant(Answer):
    """A role on every name that begins with `prefix`."""

    role: str
    prefix: str


class Token(Answer):
    """A token without its secret, or an accepted client certificate; `expires` null: it does not expire."""

    id: str
    name: str
    grants: list[Grant]
    created: Time
    expires: Time | None
    certificate: str | None


class CreatedToken(Answer):
    """A new token: `token` is its text, which no other answer contains; null of a certificate."""

    token: str | None
    id: str
    name: str
    grants: list[Grant]
    created: Time
    expires: Time | None
    certificate: str | None


class Tokens(Answer):
    """All tokens, by name and time of creation."""

    tokens: list[Token]


class WhoAmI(Answer):
    """The principal of a request; `anonymous` where the node asks for none."""

    principal: str
    grants: list[Grant]
    expires: Time | None


class DatagramKey(Answer):
    """The key with which a credential appends by datagram, in hexadecimal digits; null without one.

    `credential` is empty where no one is asked for a token. `minute` is now, in minutes since 1970.
    """

    credential: str
    key: str | None
    minute: int
