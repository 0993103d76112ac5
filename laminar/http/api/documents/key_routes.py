"""Documents of a topic's key routes (which partition has which keys), and of their changes."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.shared import MAX_PARTITIONS, Answer, Count, Request, RouteVersion, Time
from laminar.http.api.parameters import MAX_NUMBER

LOGICAL_PARTITIONS: Final = 65_536
# Most parts into which a partition is split by its records, and the longest time that a change may wait.
MAX_INTO: Final = 64
MAX_ROUTE_WAIT_MS: Final = 24 * 3_600_000


class KeyRange(Answer):
    """A range of keys, and the partition that has them.

    It is the range of logical partitions from `from` to `to` (excluded); a key belongs to one of these by its
    hash.
    """

    start: Count = field(name="from")
    to: Count
    partition: Count


class KeyRoute(Answer):
    """A version of a topic's key route: the ranges of keys that its partitions have."""

    version: RouteVersion
    logical_partitions: int
    ranges: list[KeyRange]


class RouteInput(Answer):
    """An input of a change of a route: a partition that the change ends (seals), and its key range.

    `end` is the partition's final end offset, and `sealed` the time at which it ended; both are null until
    its leader has reported them. A partition that is `reclaimed` has no records any more.
    """

    partition: Count
    start: Count = field(name="from")
    to: Count
    end: Count | None
    sealed: Time | None
    reclaimed: bool


class RouteChange(Answer):
    """A change of a topic's route: new partitions, the `outputs`, replace the `inputs` for the same keys.

    `version` is that of the new route. In state `preparing` the change can be cancelled; in state `closing`
    its inputs are being ended; in state `done` the new route is current. With `strict` order a consumer reads
    the inputs to their ends before it reads an output.
    """

    id: Count
    version: RouteVersion
    order: Literal["strict", "weak"]
    state: Literal["preparing", "closing", "done"]
    begun: Time
    wait_ms: Count
    inputs: list[RouteInput]
    outputs: list[KeyRange]
    waits_for: Annotated[
        list[str] | UnsetType,
        Meta(description="What it waits for, as text for people; in the answers about one change."),
    ] = UNSET


class NewRoute(Request):
    """Request to change a topic's route: new partitions replace `inputs` and take their keys.

    A single input is split: at each of the logical partitions in `cuts`, or `into` a number of parts with
    about equally many of its newest records. Without both it is moved to one new partition. Several inputs,
    whose key ranges must be neighbours, are merged into one partition.
    """

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER, description="Version of the route that it replaces.")]
    inputs: Annotated[
        list[Annotated[int, Meta(ge=0, le=MAX_NUMBER)]], Meta(min_length=1, max_length=MAX_PARTITIONS)
    ]
    cuts: Annotated[
        list[Annotated[int, Meta(ge=1, le=LOGICAL_PARTITIONS - 1)]], Meta(max_length=MAX_PARTITIONS - 1)
    ] = field(default_factory=list)
    into: Annotated[int, Meta(ge=2, le=MAX_INTO)] | UnsetType = UNSET
    wait_ms: Annotated[
        int,
        Meta(ge=0, le=MAX_ROUTE_WAIT_MS, description="Cancelled if its inputs cannot be ended by then."),
    ] = 60_000
    abandon: Annotated[
        bool, Meta(description="Drop, then, uploads and unprepared stages that are in its way.")
    ] = False
    force: Annotated[
        bool, Meta(description="Only with weak order: open the outputs though an input has no leader.")
    ] = False
    avoid: Annotated[
        list[Annotated[str, Meta(max_length=200)]],
        Meta(max_length=1000, description="Nodes that are to hold no replica of an output."),
    ] = field(default_factory=list)


class KeyRoutes(Answer):
    """The present key route of a topic, the finished changes (oldest first), and the change under way."""

    topic: str
    routes: list[KeyRoute]
    changes: list[RouteChange]
    change: RouteChange | None
