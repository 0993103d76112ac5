"""The class of a row of the table of routes, and the replies that several rows share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from laminar.http.api.append_body import JSON_TYPE
from laminar.http.api.parameters import Parameter
from laminar.http.api.roles import Needs


class Body(Enum):
    """The kind of body that an operation reads."""

    NONE = "none"
    JSON = "json"  # one of the documents in `documents`
    RECORDS = "records"  # records, in a body of any content type (`append_body`)


class Reply(NamedTuple):
    """A successful answer of a route: its status, and the possible bodies.

    `content` has the struct of the JSON document by media type; None for a body that is not such a document.
    """

    status: int
    description: str
    content: Mapping[str, type[msgspec.Struct] | None] = MappingProxyType({})


class Route(NamedTuple):
    """A row of the table: the operation for a method and a path, and what it reads and answers.

    `template` is the path, with the names of its parameters in braces; `parameters` are those of query and
    head. `needs` is the permission that the principal must have (`laminar.http.api.roles`). `document` is the
    struct of a JSON body. `replies` are the successful answers; every route may also answer a problem.
    """

    method: str
    template: str
    operation: str
    needs: Needs
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: Body = Body.NONE
    document: type[msgspec.Struct] | None = None
    replies: tuple[Reply, ...] = ()

    @property
    def query(self) -> tuple[str, ...]:
        """The names of the query parameters that the operation reads."""
        return tuple(row.name for row in self.parameters if row.place == "query")


TOPIC: Final = "/v1/topics/{topic}"
PARTITION: Final = TOPIC + "/partitions/{partition}"


def json_reply(document: type[msgspec.Struct], description: str = "Done.", *, status: int = 200) -> Reply:
    """Return a `Reply` whose body is the JSON document of a struct."""
    return Reply(status, description, MappingProxyType({JSON_TYPE: document}))


def bytes_reply(*types: str, description: str = "Done.", status: int = 200) -> Reply:
    """Return a `Reply` whose body has one of the media types `types` and is not a JSON document."""
    return Reply(status, description, MappingProxyType(dict.fromkeys(types)))


ELSEWHERE: Final = Reply(307, "To a request with `Laminar-Redirect`: another node has the partition.")
UNCHANGED: Final = Reply(304, "Nothing has changed.")
NO_CONTENT: Final = Reply(204, "Done.")
