"""The duties of group 0's leader for the cluster: the catalog's own voters, and the placement of partitions.

The controller calls `run_pass` periodically; if this node doesn't lead, it does nothing. The rules are
elsewhere and pure: `voters` for group 0 itself, `laminar.node.placement` for the partitions. Both use the
same record of how long each node has been present or absent, which begins empty with each new leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from laminar.node.access.first_token import FirstToken
from laminar.node.catalog.balancing import Balancer
from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.catalog.voters import next_step
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.host.clock import Clock
from laminar.node.placement.planner import Planner, Step
from laminar.node.placement.preferred_leaders import choosing
from laminar.node.placement.presence import Presence
from laminar.node.placement.slices import SLICE, in_slices
from laminar.node.placement.wanted import Wanted
from laminar.node.runtime.boot import Boot
from membership.catalog import CODE_VERSION, Catalog
from membership.records import CatalogState
from membership.requests import AddReplicas, PreferLeaders, RemoveReplica, ReplaceReplica

_log = logging.getLogger("laminar.controller")

NEXT_STEP_S = 0.02

# A pass looks at the partitions that changed, at those that need a step, and takes some 10 to 40 us for each.
LEAST_PAUSE_MS = 200
PAUSE_MS_PER_PARTITION = 0.1


class LeaderDuties:
    """The leader's periodic work in one controller: group 0's voters, the placement, the preferred leaders.

    `again()` is called `NEXT_STEP_S` after a change of group 0's voters, as another may follow.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        clock: Clock,
        driver: Driver,
        directory: NodeDirectory,
        balancer: Balancer,
        first_token: FirstToken | None,
        again: Callable[[], None],
    ) -> None:
        self._boot = boot
        self._clock = clock
        self._driver = driver
        self._directory = directory
        self._balancer = balancer
        self._again = again
        self._first_token = first_token
        self._presence = Presence()
        self._planner = Planner(Wanted(CatalogState()))
        # What the last pass planned from, if it found nothing to do: the same has nothing to do again.
        self._idle_at: object = None
        self._next_ms = 0
        self._next_spread_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run_pass(self, group: CatalogGroup) -> None:
        """Do the duties that are due: change the catalog's voters and the placement by one step each.

        `NotCatalogLeader`, `NotLeader` (this node lost the leadership) and `ConfigurationRefused` may be
        raised; the caller tries again later.
        """
        replica = group.replica
        if not replica.core.is_leader:
            if self._planner.begun:
                self._planner = Planner(Wanted(CatalogState()))
            self._presence.forget()
            self._idle_at = None
            return
        if group.applied_index < replica.log.last_index:
            # No step before all entries are committed, and none by an old state: by that, nodes that joined
            # since are no members. The next pass tries again.
            return
        now_ms = self._clock.monotonic_ms()
        absent = self._absent(group)
        self._presence.observe(group.catalog.state().nodes, absent=absent, now_ms=now_ms)
        gone = self._presence.gone(self._boot.settings.replace_after_ms, now_ms=now_ms)
        if self._change_voters(group, gone=gone, absent=absent):
            return
        await self._enable_commands(group)
        if self._first_token is not None:
            await self._first_token.make_if_none(group.catalog)
        await self._place(group, gone=gone, now_ms=now_ms)
        await self._balancer.run_pass(group, absent=absent)

    async def _enable_commands(self, group: CatalogGroup) -> None:
        """Enable the newest code version of the catalog's commands once the programs of all nodes know it."""
        catalog = group.catalog
        nodes = catalog.state().nodes.values()
        known = min((node.code_version for node in nodes), default=0)
        if catalog.code_version < min(known, CODE_VERSION):
            await catalog.enable(min(known, CODE_VERSION))
            _log.info("the catalog's commands of version %d are enabled", min(known, CODE_VERSION))

    async def _place(self, group: CatalogGroup, *, gone: set[str], now_ms: int) -> None:
        """Begin the next steps of moving partitions, and change preferred leaders where that is due."""
        catalog = group.catalog
        state = catalog.state()
        settings = self._boot.settings
        settle_ms = min(settings.settle_ms, settings.replace_after_ms or settings.settle_ms)
        settled = self._presence.settled(settle_ms, now_ms=now_ms)
        present = self._presence.present()
        voting = frozenset(node for _, node in group.replica.configuration_record.voters)
        seen = (state.version, catalog.code_version, frozenset(gone), frozenset(settled), frozenset(present))
        if self._idle_at == (seen, voting) or self._too_soon(now_ms):
            return
        planner = self._planner
        planner.follow(state, gone=gone, present=present, settled=settled)
        while planner.look(SLICE):
            await asyncio.sleep(0)
            planner.follow(catalog.state(), gone=gone, present=present, settled=settled)
        self._next_ms = now_ms + int(max(LEAST_PAUSE_MS, PAUSE_MS_PER_PARTITION * planner.waiting))
        steps = planner.steps(voting=voting)
        done = 0
        for step in steps:
            if isinstance(step, ReplaceReplica):
                result = await catalog.change_replicas(step)
            elif catalog.code_version >= 1:
                result = await catalog.change_placement(step)
            else:
                continue  # an older program does not know the command
            done += result.ok
            urgent = isinstance(step, ReplaceReplica) and step.why != "moved"
            _log.log(
                logging.WARNING if urgent else logging.INFO,
                "%s: %s; %s %s",
                step.partition,
                step.because,
                result.outcome,
                result.detail or _what(step),
            )
        if catalog.code_version >= 1:
            chosen = await self._leaders(catalog, gone=gone, now_ms=now_ms)
            if chosen:
                result = await catalog.change_placement(PreferLeaders(chosen))
                done += result.outcome == "updated"
            done += chosen is None
        # A refused step is an entry of the log as well: it is not repeated until something has changed.
        self._idle_at = None if done else (seen, voting)

    async def _leaders(self, catalog: Catalog, *, gone: set[str], now_ms: int) -> dict[str, str] | None:
        """Return the preferred leaders to be changed; None if that is left to a later pass.

        A new partition gets a preferred leader at once. A better spread of all of them takes a look at every
        partition, so it is computed less often if there are many.
        """
        leaders = self._planner.leaders
        missing = leaders.missing()
        if missing or not leaders.uneven():
            return missing
        if now_ms < self._next_spread_ms:
            self._call_again(self._next_spread_ms - now_ms)
            return None
        state = catalog.state()
        pause_ms = max(LEAST_PAUSE_MS, PAUSE_MS_PER_PARTITION * len(state.partitions))
        self._next_spread_ms = now_ms + int(pause_ms)
        chosen = await in_slices(choosing(state, unfit=gone))
        now = catalog.state().partitions
        return {key: node for key, node in chosen.items() if now.get(key) is state.partitions[key]}

    def _change_voters(self, group: CatalogGroup, *, gone: set[str], absent: set[str]) -> bool:
        """Change group 0's configuration by one step if the rules ask for one; return whether they did."""
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

    def _too_soon(self, now_ms: int) -> bool:
        """Return whether the last pass over all partitions was just now; if so, schedule another one."""
        if now_ms >= self._next_ms:
            return False
        self._call_again(self._next_ms - now_ms)
        return True

    def _call_again(self, pause_ms: int) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + pause_ms / 1000
        if self._timer is not None and self._timer.when() <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._when_due)

    def _when_due(self) -> None:
        self._timer = None
        self._again()

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


def _what(step: Step) -> str:
    """Return a text for the log that says what a step of the planner does."""
    match step:
        case ReplaceReplica():
            return f"a new replica on {step.node}"
        case AddReplicas():
            return f"new replicas on {', '.join(step.nodes)}"
        case RemoveReplica():
            return f"replica {step.replica_id} is removed"
