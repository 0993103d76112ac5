"""Detection, on the leader, of replicas that need a catch-up, and the offers to them.

They are of two kinds. A replica of the first kind lacks entries that are no longer in the leader's log; Raft
itself says which these are, and appends cannot help them. A replica of the second kind is *far* behind: it
lacks at least half of the log, and many bytes. It gets its log at a bounded rate, in place of appends, which
have no such bound. For this kind a catch-up is only faster: if no new log is built, appends go on.

For a voter, only bytes in sealed segments count: under a load that fills a young log fast, every voter may
lack much of the last segment for a moment. For a learner all committed bytes count, and the threshold is much
lower: after a node's death all learners of the cluster are empty at once, and appends to them would delay
those to all other replicas. So a new learner is looked at as soon as it answers, not by the periodic check
(`watch`): until then it would have got half a second of appends at full speed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from laminar.node.catch_up.messages import OFFER, Offer, OfferAnswer
from laminar.node.catch_up.source import Source
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.host.periodic import Work
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Address, Transport, TransportError
from raft.progress import Flow, Progress

_log = logging.getLogger("laminar.catch_up")

OFFER_TIMEOUT_S = 5.0
# Appends to a replica that is far behind wait this long for a catch-up that does not begin, or has stopped.
PATIENCE_S = 20.0
# After that it gets appends for at least this long, before a catch-up is tried again.
NOT_AGAIN_S = 300.0
# A learner that lacks this much is far behind, unless `catch_up_bytes` is less.
LEARNER_FAR_BYTES = 4 << 20
# How often it is looked whether a new learner has answered, and for how long.
WATCH_PAUSE_S = 0.02
WATCH_S = 10.0

_answer_decoder = msgspec.msgpack.Decoder(OfferAnswer)


def may_lag(partition: Partition) -> bool:
    """Return whether a group led here has a replica that lacks entries, as far as is known."""
    replica = partition.replica
    last_index = partition.log.last_index
    return replica.leading and any(
        each.match_index < last_index or each.needs_catch_up for each in replica.core.progress.values()
    )


class Lagging:
    """Detects lagging replicas in the groups that are led here, and offers them a catch-up.

    A voter is far behind only if it lacks at least `far_bytes`, a learner only if it lacks `learner_bytes`.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        transport: Transport,
        source: Source,
        address_of: Callable[[str, Replica], Address | None],
        far_bytes: int,
    ) -> None:
        self._driver = driver
        self._transport = transport
        self._source = source
        self._address_of = address_of
        self._far_bytes = far_bytes
        self.learner_bytes = min(far_bytes, LEARNER_FAR_BYTES)
        # By (group, replica id), times of the loop, for replicas that are far behind: when appends resume if
        # the replica requests nothing meanwhile; until when no catch-up is tried again.
        self._until_s: dict[tuple[bytes, int], float] = {}
        self._not_before_s: dict[tuple[bytes, int], float] = {}
        self.offers = 0

    def check_all(self, partitions: Iterable[Partition]) -> Work | None:
        """Check all groups that are led here; return the work of sending offers, None if none is due."""
        offers = []
        for partition in list(partitions):
            replica = partition.replica
            # Most are led elsewhere, or have no other replica: looking at these must cost next to nothing.
            if not replica.leading or len(replica.core.progress) <= 1 or replica.failure is not None:
                continue
            try:
                offers += self._offers_of(partition)
            except Exception as error:  # noqa: BLE001  # stops this partition's replica
                partition.stop(error)
        return _all(offers) if offers else None

    def _offers_of(self, partition: Partition) -> list[Work]:
        replica = partition.replica
        offers = []
        # A voter of a large log, or a learner of one that is not small: few are looked at any closer.
        size_bytes = partition.log.size_bytes
        learners = bool(replica.configuration.learners)
        large = size_bytes >= 2 * self._far_bytes or (learners and size_bytes >= self.learner_bytes)
        for progress in list(replica.core.progress.values()):
            if progress.replica_id == replica.replica_id:
                continue
            if large and not progress.needs_catch_up and self._is_far(partition, progress):
                self._take_over(partition, progress)
            if progress.needs_catch_up:
                offers.append(self._offer(replica, progress))
            else:
                self._done(replica, progress.replica_id)
        return offers

    def _is_far(self, partition: Partition, progress: Progress) -> bool:
        log = partition.log
        held = progress.match_index if progress.flow is Flow.REPLICATE else progress.next_index - 1
        if not progress.active:
            return False
        if self._is_learner(partition, progress):
            missing, many = _committed_bytes(partition, after=held), self.learner_bytes
        else:
            missing, many = _sealed_bytes(partition, after=held), self._far_bytes
        if missing < many or 2 * missing < log.size_bytes:
            return False
        key = (partition.replica.group, progress.replica_id)
        return asyncio.get_running_loop().time() >= self._not_before_s.get(key, 0.0)

    @staticmethod
    def _is_learner(partition: Partition, progress: Progress) -> bool:
        return progress.replica_id in partition.replica.configuration.learners

    def _take_over(self, partition: Partition, progress: Progress) -> None:
        """Stop Raft's appends to a replica until it has caught up.

        That is when a voter has all committed sealed segments, or a learner all that is committed now.
        """
        replica = partition.replica
        resume_index = replica.core.committed_index
        if not self._is_learner(partition, progress):
            ends = [segment.last_index for segment in partition.log.sealed_segments()]
            resume_index = max(end for end in ends if end <= resume_index)
        replica.core.catch_up(progress.replica_id, resume_index=resume_index)
        self._driver.process_ready(replica)
        key = (replica.group, progress.replica_id)
        self._until_s[key] = asyncio.get_running_loop().time() + PATIENCE_S

    async def watch(self, partition: Partition) -> None:
        """Watch a group with new learners until each has answered, and offer a catch-up where needed."""
        replica = partition.replica
        until_s = asyncio.get_running_loop().time() + WATCH_S
        while asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(WATCH_PAUSE_S)
            if not replica.leading or replica.failure is not None:
                return
            work = self.check_all([partition])
            if work is not None:
                await work
            learners = [replica.core.progress.get(each) for each in replica.configuration.learners]
            if all(each is None or each.needs_catch_up or each.match_index for each in learners):
                return

    async def _offer(self, replica: Replica, progress: Progress) -> None:
        receiver = progress.replica_id
        # Each check offers again: a replica that is building its log answers so, one that has stopped begins
        # again.
        await self._call(replica, receiver)
        key = (replica.group, receiver)
        now_s = asyncio.get_running_loop().time()
        if self._source.reading_from(replica.group, receiver) is not None:
            if key in self._until_s:
                self._until_s[key] = now_s + PATIENCE_S
        elif key in self._until_s and now_s >= self._until_s[key]:
            del self._until_s[key]
            self._not_before_s[key] = now_s + NOT_AGAIN_S
            replica.core.resume(receiver)
            self._driver.process_ready(replica)

    async def _call(self, replica: Replica, receiver: int) -> None:
        node = replica.nodes.get(receiver)
        address = self._address_of(node, replica) if node is not None else None
        if address is None:
            return
        offer = Offer(replica.group, replica.replica_id, receiver, replica.core.term)
        self.offers += 1
        try:
            answer = await self._transport.call(
                address, OFFER, msgspec.msgpack.encode(offer), timeout=OFFER_TIMEOUT_S
            )
        except TransportError as error:
            _log.debug("%s: %s does not answer the offer to catch up: %s", replica.name, node, error)
            return
        found = _answer_decoder.decode(answer)
        if not found.working:
            _log.debug("%s: %s declines to catch up now: %s", replica.name, node, found.detail)

    def _done(self, replica: Replica, receiver: int) -> None:
        self._until_s.pop((replica.group, receiver), None)
        self._source.done(replica.group, receiver)


def _sealed_bytes(partition: Partition, *, after: int) -> int:
    """Return the bytes of the committed sealed segments whose entries all come after entry `after`."""
    return sum(
        segment.size
        for segment in partition.log.sealed_segments()
        if after < segment.first_index and segment.last_index <= partition.committed_index
    )


def _committed_bytes(partition: Partition, *, after: int) -> int:
    """Return about how many bytes of committed entries come after entry `after`.

    Of a segment that lies partly before `after`, the bytes are estimated by the number of entries.
    """
    found = 0
    for segment in partition.log.segments():
        last = min(segment.last_index, partition.committed_index)
        entries = last - max(segment.first_index - 1, after)
        if entries > 0:
            found += segment.size * entries // (segment.last_index - segment.first_index + 1)
    return found


async def _all(offers: Iterable[Work]) -> None:
    await asyncio.gather(*offers)
