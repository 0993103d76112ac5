"""The jobs that a part of a commit acknowledges, as its tokens name them."""

from __future__ import annotations

from laminar.http.api.documents.transactions import CommitAcks, CommitPart
from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices, check_enabled
from laminar.node.partition.state.pins import PINS_SINCE
from laminar.wire.channels import Named, parse_token


async def check_pins(services: ShardServices) -> None:
    """Refuse acknowledgements while a node's program is older than pins.

    That is asked before the commit begins. Leaders of older programs pass over the field: they would commit
    the records and leave the jobs, which come again.

    Raises:
        Problem: 503 `not_enabled`.
    """
    await check_enabled(services, PINS_SINCE, "an acknowledgement in a transaction")


def tokens_of(part: CommitPart, acks: CommitAcks, *, field: str) -> list[Named]:
    """Return what the tokens name; `field` is the place of `acks` in the request.

    Raises:
        Problem: 422 `invalid` when one is no token, or of another partition than the part's.
    """
    found = []
    for place, text in enumerate(acks.tokens):
        where = f"{field}.tokens.{place}"
        try:
            named = parse_token(text)
        except ValueError as error:
            raise Problem("invalid", str(error), field=where, value=text) from None
        if named.partition != part.partition:
            raise Problem(
                "invalid", "the job is of another partition", field=where, value=text, limit=part.partition
            )
        found.append(named)
    return found
