"""Common parts of the documents: their base classes, the types of members, and limits."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from laminar.http.api.parameters import ID_PATTERN, MAX_EPOCH, MAX_NUMBER

MAX_PARTITIONS: Final = 4096
MAX_REPLICAS: Final = 7

# The value of a stored setting. A newer node may have stored a setting that this node does not know.
Setting = int | str

Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Id = Annotated[str, Meta(pattern=f"^{ID_PATTERN}$")]
Count = Annotated[int, Meta(ge=0)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
RouteVersion = Annotated[int, Meta(description="Version of the key route.")]


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """The base class of the documents in requests; unknown members are refused."""


class Answer(msgspec.Struct):
    """The base class of the documents in answers."""
