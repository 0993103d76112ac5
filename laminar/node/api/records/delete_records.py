"""The route that deletes the records before an offset.

The leader proposes a `log_start` entry, as retention does (`laminar.node.partition.retention`). So the new
start is the first offset of a batch, at or before the requested offset, and the end of the partition does not
change. The answer tells the leader's state when the entry was committed. A repeated request finds nothing
left to delete.

The importer of a topic may request an offset beyond the end: the log then continues at this offset.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.http.api.documents import records as documents
from laminar.http.api.parameters import IMPORT, OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.records.fetch import FetchRoutes
from laminar.node.partition.partition import Partition


class DeleteRecordsRoute:
    """The handler of the route that deletes records.

    `trimmable_index(partition, index)` returns the highest index, at most `index`, up to which the log may be
    trimmed now.
    """

    def __init__(
        self, services: ShardServices, fetch: FetchRoutes, *, trimmable_index: Callable[[Partition, int], int]
    ) -> None:
        self._services = services
        self._trimmable_index = trimmable_index
        self._fetch = fetch

    async def records(self, request: Request, topic: str, partition: str) -> Response:
        """Answer DELETE .../partitions/{partition}/records?before=n: trim the records before an offset.

        With `dry_run=true` only report what would be trimmed.
        """
        if "before" not in request.query:
            raise Problem(
                "invalid",
                "the query parameter `before` is required, for example ?before=812",
                field="before",
                limit=OFFSET_LIMIT,
            )
        before = integer(request, "before", 0, maximum=OFFSET_LIMIT)
        dry_run = _yes(request, "dry_run")
        led = await self._fetch.led(request, topic, partition)
        if isinstance(led, Response):
            return led
        # The client is the topic's importer: `TopicLookup.check_import` has checked that.
        imports = IMPORT.name.lower() in request.headers
        if imports and not dry_run:
            await led.start_mover.skip_to(before)
        end = await led.reader.confirmed_end()
        if before > end:
            raise Problem(
                "offset_beyond_end",
                f"the partition ends at {end}; records beyond its end cannot be deleted",
                field="before",
                value=before,
                limit=end,
            )
        return await self._trim(led, before, dry_run=dry_run, hold=not imports)

    async def _trim(self, partition: Partition, before: int, *, dry_run: bool, hold: bool) -> Response:
        """Trim the log before an offset; with `hold` only entries that no replica in catch-up still needs.

        Without `hold` such a replica is sent whole segments again.
        """
        log = partition.log
        wanted = await partition.start_mover.index_before(before)
        old_start, old_index = partition.start_offset, log.start.index
        border = partition.start_mover.possible_start(max(old_index, wanted))
        trimmable = self._trimmable_index(partition, border) if hold else border
        index = partition.start_mover.possible_start(max(old_index, trimmable))
        new_start = log.index_entry(index).next_offset if index > old_index else old_start
        held_back_by = partition.replica.lagging(border) if index < border else []
        if not dry_run and new_start > old_start:
            await partition.start_mover.delete(index)
        elif not dry_run:
            # Channels may have copies of records that were trimmed.
            await partition.start_mover.delete_copies(min(before, old_start))
        return Response.json(
            documents.DeletedRecords(
                topic=partition.topic,
                partition=partition.number,
                before=before,
                dry_run=dry_run,
                deleted=new_start - old_start,
                from_offset=old_start,
                start_offset=new_start,
                rounded_down=index == border and new_start < before,
                held_back_by=held_back_by,
            ),
            headers=[
                ("Laminar-Node", self._services.node),
                ("Laminar-Shard", str(self._services.number)),
                ("Laminar-Route", str(self._fetch.topics.version(partition.topic))),
                ("Laminar-Start-Offset", str(partition.start_offset)),
                ("Laminar-End-Offset", str(partition.end_offset)),
            ],
        )


def _yes(request: Request, name: str) -> bool:
    text = request.query.get(name, "false")
    if text not in ("true", "false", "1", "0", ""):
        raise Problem("invalid", f"{name} must be true or false", field=name, value=text, limit="true, false")
    return text in ("true", "1", "")
