"""The voters of group 0: the rule by which its leader changes the group's configuration step by step.

Every node has one replica of group 0, under the id that the catalog gave it when it joined. All follow; up to
five of them vote, or three where there are fewer than five nodes. A voter whose node has been gone for long
is swapped for a learner on a living node that holds all that is committed. The voter is removed first, as a
dead voter only makes a majority harder to reach; then the learner is promoted. If no learner can replace it,
it is removed only if more than three vote. So a cluster of five nodes that die one after another keeps its
catalog down to the last two. With three voters a dead one stays a voter, as it may come back before the next
one dies. As for partitions, nothing is swapped while too many nodes are gone at once, and each step waits for
the one before.

A voter whose node is draining is swapped as well, though there the learner is promoted first: the voter can
still vote until it is removed. If all other nodes vote already, the voter is removed without a successor. A
node that was removed from the cluster is no longer a member.

A removed voter is added again as a learner, under the same id. It has lost nothing that it promised, so its
messages can do no harm, and when its node is back the leader brings it up to date like any other. A store
that is lost or wiped needs no rule: its node never starts again under that name, so it counts as gone. A
store that was put back from an older copy is known to have forgotten promises: its replica is swapped at
once, and never votes again.

Which nodes are gone or present is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.placement.planner import too_many_gone
from membership.records import (
    CatalogState,
)

MOST_VOTERS = 5
FEWEST_VOTERS = 3


def next_step(
    current: ConfigurationRecord,
    state: CatalogState,
    *,
    gone: Collection[str],
    ready: Callable[[int, str], bool],
    majority_active: Callable[[ConfigurationRecord], bool],
) -> ConfigurationRecord | None:
    """Return group 0's next configuration; None if `current` is as it should be, or no step is possible now.

    `gone` are nodes that have been absent for long. `ready(replica id, node)` says whether a learner's node
    is present now and its replica holds all that is committed; `majority_active(configuration)`, whether
    messages of a majority of that configuration's voters came lately.
    """
    members = current.nodes()
    for node in sorted(state.nodes.values(), key=lambda node: node.catalog_replica):
        if node.catalog_replica not in members:
            return current.with_learner(node.catalog_replica, node.node)
    ids = {node.catalog_replica for node in state.nodes.values()}
    for replica_id in members:
        # Only a founder is a member before it is registered.
        if ids and replica_id not in ids and majority_active(without := current.without(replica_id)):
            return without
    rolled_back = {node.node for node in state.nodes.values() if node.rolled_back}
    draining = {node.node for node in state.nodes.values() if node.draining}
    unfit = rolled_back | draining | set(gone)
    wanted = MOST_VOTERS if len(state.nodes.keys() - unfit) >= MOST_VOTERS else FEWEST_VOTERS
    votes = len(current.voters)
    fit = (replica_id for replica_id, name in current.learners if name not in unfit)
    spare = next((replica_id for replica_id in fit if ready(replica_id, members[replica_id])), None)
    voting = {name for _, name in current.voters}
    # A draining voter can still vote, so its successor is promoted before it is removed.
    if spare is not None and (votes < wanted or (votes == wanted and voting & draining - set(gone))):
        return current.promoted(spare)
    if spare is None and voting & draining and voting - unfit:
        # All nodes that stay vote, or cannot yet; then the draining one goes without a successor.
        waiting = [name for _, name in current.learners if name not in unfit]
        for replica_id, name in current.voters:
            if name in draining and not waiting and majority_active(without := current.without(replica_id)):
                return without
    if spare is not None or votes > wanted:
        for replica_id, name in current.voters:
            if name in unfit and majority_active(without := current.without(replica_id)):
                return without if not too_many_gone(state, gone, voting=voting) else None
    return None
