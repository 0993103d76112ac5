"""The acknowledgements of jobs in a commit: decode their tokens, and check that all nodes support them."""

from __future__ import annotations

from laminar.http.api.documents.transactions import CommitAcks, CommitPart
from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices, check_enabled
from laminar.node.partition.state.pins import PINS_SINCE
from laminar.wire.channels import Named, parse_token


async def check_pins(services: ShardServices) -> None:
    """Refuse acknowledgements in a commit while a node's program is too old to pin jobs.

    Call it before the commit begins: a leader with an older program ignores the field, and would commit the
    records without acknowledging the jobs, which would be given out again.

    Raises:
        Problem: 503 `not_enabled`.
    """
    await check_enabled(services, PINS_SINCE, "an acknowledgement in a transaction")


def tokens_of(part: CommitPart, acks: CommitAcks, *, field: str) -> list[Named]:
    """Return the jobs that the tokens name; `field` is the path of `acks` in the request.

    Raises:
        Problem: 422 `invalid` if a token is malformed, or is of another partition than the part.
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
