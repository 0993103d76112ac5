"""Appends with `ack=accepted`: they are answered with 202 before the batch is durable.

202 is no receipt: the batch is only in its leader's log, and is lost if the leader dies before a majority has
it. So this is only for batches with a producer id, which may be sent again, and the answer has none of a
receipt's fields. Every append's answer has `Laminar-Term` and `Laminar-Committed`. An accepted batch
is durable once any answer of the same term has a `Laminar-Committed` beyond it (after Swift's accepted and
persisted).
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.batch import NO_PRODUCER, Flag, Header
from laminar.http.api.append_body import Append
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.answer_head import AnswerHead, durability
from laminar.node.partition.partition import Partition

ACKS = ("committed", "accepted")


def accepted(
    request: Request,
    append: Append,
    partition: Partition,
    head: AnswerHead,
    route: int,
    *,
    count: Callable[[Header], None],
) -> Response:
    """Append one batch to its leader's log, and answer 202 before it is synced or replicated.

    `head` encodes the headers of every answer, `route` is the version of the topic's route. `count` counts
    the batch's producer against its principal's limit if it is new, and raises if the limit is exceeded.
    """
    ack = request.query["ack"]
    if ack != "accepted":
        raise Problem(
            "invalid", "ack must be `committed` or `accepted`", field="ack", value=ack, limit=", ".join(ACKS)
        )
    header = Header.unpack(append.frames[0]) if len(append.frames) == 1 else None
    if header is None or header.producer_id == NO_PRODUCER or header.flags & Flag.KEYED:
        raise Problem(
            "invalid",
            "ack=accepted requires exactly one batch with a producer id",
            field="ack",
            value=ack,
            limit="committed",
        )
    frame = append.frames[0]
    # A leader stamps a batch in place, so it needs a writable copy of its own.
    frame = memoryview(bytearray(frame)) if frame.readonly else frame
    count(header)
    receipt = partition.appends.accept_frame(frame, header)
    window = partition.copies.window()
    body = (
        f'{{"durable":false,"partition":{receipt.partition},"offset":{receipt.offset},"count":{receipt.count},'
        f'"term":{window.term},"route":{route},"committed":{window.end},'
        f'"when_durable":{{"replicas":{window.voters},{durability(partition)}}}}}\n'
    ).encode()
    headers = [("Laminar-Replayed", "1")] if receipt.duplicate else []
    return Response(202, headers, body, header_block=head.block(partition.topic, window))
