"""The duties of group 0's leader for the cluster: the catalog's own voters, and replicas to be replaced.

The controller calls `run_pass` periodically; where this node doesn't lead, it does nothing. The rules are
elsewhere and pure: `voters` for group 0 itself, `replacement` for the partitions. Both use the same record of
how long each node has been absent, which begins empty with each new leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.catalog.replacement import Absence, plan
from laminar.node.catalog.voters import next_step
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.host.clock import Clock
from laminar.node.runtime.boot import Boot

_log = logging.getLogger("laminar.controller")

NEXT_STEP_S = 0.02


class LeaderDuties:
    """The duties of one controller.

    `again()` is called `NEXT_STEP_S` after a change of group 0's voters, as another may follow.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        clock: Clock,
        driver: Driver,
        directory: NodeDirectory,
        again: Callable[[], None],
    ) -> None:
        self._boot = boot
        self._clock = clock
        self._driver = driver
        self._directory = directory
        self._again = again
        self._absence = Absence()

    async def run_pass(self, group: CatalogGroup) -> None:
        """Perform one pass.

        Raises:
            NotCatalogLeader: try again later; likewise `NotLeader` and `ConfigurationRefused`.
        """
        replica = group.replica
        if not replica.core.is_leader:
            self._absence.forget()
            return
        if group.committed_index < replica.log.last_index:
            return  # no step before all entries are committed; the next pass tries again
        now_ms = self._clock.monotonic_ms()
        absent = self._absent(group)
        self._absence.observe(absent, now_ms=now_ms)
        gone = self._absence.longer_than(self._boot.settings.replace_after_ms, now_ms=now_ms)
        if not self._change_voters(group, gone=gone, absent=absent):
            await self._replace(group, gone=gone)

    def _change_voters(self, group: CatalogGroup, *, gone: set[str], absent: set[str]) -> bool:
        """Take group 0's configuration one step further; return whether there was one to take."""
        if not self._boot.has_peers:
            return False  # this node's folder does not record yet that the cluster has other nodes
        replica = group.replica

        def ready(replica_id: int, node: str) -> bool:
            return node not in absent and replica.match_index(replica_id) >= group.committed_index

        def majority_active(step: ConfigurationRecord) -> bool:
            return replica.core.majority_active(step.configuration().voters)

        current = replica.configuration_record
        step = next_step(
            current, group.catalog.state(), gone=gone, ready=ready, majority_active=majority_active
        )
        if step is None:
            return False
        self._driver.propose_configuration(replica, step)
        _log.info("catalog voters %s, learners %s", step.voters, step.learners)
        asyncio.get_running_loop().call_later(NEXT_STEP_S, self._again)
        return True

    async def _replace(self, group: CatalogGroup, *, gone: set[str]) -> None:
        """Replace the replicas of nodes that are gone, and those that are lost."""
        voting = {node for _, node in group.replica.configuration_record.voters}
        weights = self._directory.placement_weights()
        for step in plan(group.catalog.state(), gone=gone, weights=weights, voting=voting):
            result = await group.catalog.change_replicas(step)
            _log.warning(
                "%s: replica %d is %s; a new one on %s: %s %s",
                step.partition,
                step.replica_id,
                step.why,
                step.node,
                result.outcome,
                result.detail,
            )

    def _absent(self, group: CatalogGroup) -> set[str]:
        """Return the nodes that neither gossip nor group 0 has seen lately."""
        core = group.replica.core
        statuses = self._directory.statuses()
        absent = set()
        for name, record in group.catalog.state().nodes.items():
            seen = core.progress.get(record.catalog_replica)
            # A quiesced group sends no messages, but is quiesced only with members whose process is active.
            active = record.catalog_replica in core.quiesce_peers or (
                seen is not None and seen.active and not core.quiesced
            )
            if statuses.get(name) != "alive" and not active:
                absent.add(name)
        return absent
