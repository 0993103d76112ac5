"""The rules of placement: planner, commands, preferred leaders, and the catalog's voters."""

from __future__ import annotations

from tests.sim.mutants.case import case

PLANNER = ("tests/node/placement/test_planner.py",)
RULES = ("tests/membership/test_placement_rules.py",)
MOVES = ("tests/membership/test_replica_rules.py",)
LEADERS = ("tests/node/placement/test_preferred_leaders.py",)
VOTERS = ("tests/node/catalog/test_voters.py",)
DUTIES = ("tests/sim/test_placement_worlds.py::test_a_node_that_comes_and_goes_moves_nothing",)
ENABLED = ("tests/sim/test_placement_worlds.py::test_a_command_waits_until_every_program_knows_it",)

_PLANNER = "laminar.node.placement.planner:"
_STEP = _PLANNER + "Planner.step"
_BUDGETS = _PLANNER + "Planner.within_budgets"
_WANTED = "laminar.node.placement.wanted:"
_PRESENCE = "laminar.node.placement.presence:Presence."
_RULES = "membership.placement_rules:"
_VOTERS = "laminar.node.catalog.voters:next_step"
_LEADERS = "laminar.node.placement.preferred_leaders:"

# By the rule that it breaks: a name, a function, the text and what becomes of it, and the tests.
_MUTANTS = (
    # Order.
    (
        "a partition that lacks a copy makes a later step",
        _STEP,
        "if any(self._why_unfit(each) for each in partition.replicas):",
        "if False:",
        PLANNER,
    ),
    (
        "voluntary steps get their share before replacements",
        _PLANNER + "Planner.steps",
        "key=lambda planned: (planned.precedence, planned.step.partition)",
        "key=lambda planned: (-planned.precedence, planned.step.partition)",
        PLANNER,
    ),
    # One step of a partition at a time.
    (
        "a step is planned while a replica leaves",
        _STEP,
        "if partition.leaving or not all(",
        "if not all(",
        PLANNER,
    ),
    (
        "a step is planned while a replica is not made",
        _STEP,
        "if partition.leaving or not all(each.made for each in partition.replicas):",
        "if partition.leaving:",
        PLANNER,
    ),
    (
        "a replica moves beside another",
        "membership.replica_rules:_why_not",
        '(1 if request.why == "moved" else MOST_LEAVING)',
        "MOST_LEAVING",
        MOVES,
    ),
    (
        "replicas leave in any number",
        "membership.replica_rules:_why_not",
        '(1 if request.why == "moved" else MOST_LEAVING)',
        '(1 if request.why == "moved" else 100)',
        MOVES,
    ),
    (
        "a move whose new node dies never ends",
        "membership.replica_rules:_why_not",
        '(1 if request.why == "moved" else MOST_LEAVING)',
        "1",
        MOVES,
    ),
    (
        "a replica is placed on the node that another one of its group is leaving",
        _PLANNER + "Planner._place_for",
        " | {each.node for each in leaving_by_choice(partition)}",
        "",
        PLANNER,
    ),
    (
        "the catalog accepts a replica on the node that another one of its group is leaving",
        "membership.replica_rules:_why_not",
        "(*others, *leaving_by_choice(partition))",
        "others",
        MOVES,
    ),
    (
        "the catalog accepts two steps of a partition at a time",
        _RULES + "_at_version",
        "if partition.leaving or not all(each.made for each in partition.replicas):",
        "if False:",
        RULES,
    ),
    (
        "of two administrators of a partition none is refused",
        _RULES + "_at_version",
        "if partition.version != version:",
        "if False:",
        RULES,
    ),
    (
        "of two administrators of a topic none is refused",
        _RULES + "alter_topic",
        "if request.version != topic.version:",
        "if False:",
        RULES,
    ),
    (
        "of two administrators of a node none is refused",
        _RULES + "alter_node",
        "if node.version != request.version:",
        "if False:",
        RULES,
    ),
    (
        "a node is removed on the word of an older decision",
        _RULES + "remove_node",
        "if node.version != request.version:",
        "if False:",
        RULES,
    ),
    (
        "the choice of a preferred leader refuses the step that was decided before",
        _RULES + "prefer_leaders",
        "replace(partition, preferred_leader=node)",
        "replace(partition, preferred_leader=node, version=state.version + 1)",
        RULES,
    ),
    # Growth comes whole.
    ("a partition grows by one", _PLANNER + "Planner._growth", "[:missing]", "[:1]", PLANNER),
    (
        "growth does not wait for a node that settles",
        _PLANNER + "Planner._growth",
        "if any(node in self._present and node not in self._settled for node in new):",
        "if False:",
        PLANNER,
    ),
    (
        "a partition gets more replicas than are asked for",
        _RULES + "add_replicas",
        "if len(held) + len(request.nodes) > wanted:",
        "if False:",
        RULES,
    ),
    # Voluntary steps wait for nodes that are absent.
    (
        "a partition loses a replica while one that stays is absent",
        _PLANNER + "Planner._shrinking",
        "if not all(each.node in self._present for each in partition.replicas if each is not replica):",
        "if False:",
        PLANNER,
    ),
    (
        "a replica moves while another is absent",
        _PLANNER + "Planner._move",
        " or not held <= self._present",
        "",
        PLANNER,
    ),
    # A drain never lowers the number of replicas.
    (
        "a drain takes a replica for which there is no other place",
        _STEP,
        "number = wanted_number(self._state, partition)",
        "number = len(self._wanted.nodes(partition))",
        PLANNER,
    ),
    (
        "a partition loses a replica of as many as are asked for",
        _RULES + "remove_replica",
        "if len(partition.replicas) <= max(wanted, 1):",
        "if False:",
        RULES,
    ),
    (
        "a draining node is among the nodes that are wanted",
        _WANTED + "belonging_weights",
        " and not node.draining",
        "",
        PLANNER,
    ),
    (
        "a node whose folder is an older copy is among the nodes that are wanted",
        _WANTED + "belonging_weights",
        " and not node.rolled_back",
        "",
        PLANNER,
    ),
    (
        "a draining node, or one with an older folder, gets replicas",
        _RULES + "_may_hold",
        " and not node.draining and not node.rolled_back",
        "",
        RULES,
    ),
    (
        "an older folder gets replicas",
        _RULES + "_may_hold",
        " and not node.rolled_back",
        "",
        RULES,
    ),
    (
        "a draining node gets the successor of a replica",
        "membership.replica_rules:_why_not",
        "if state.nodes[request.node].draining:",
        "if False:",
        RULES,
    ),
    (
        "a partition is pinned to a node that is draining",
        _RULES + "pin_partition",
        "if draining:",
        "if False:",
        RULES,
    ),
    # What is wanted.
    (
        "what is commanded of a node's weight counts for nothing",
        _WANTED + "belonging_weights",
        "name: node.effective_weight",
        "name: node.weight",
        PLANNER,
    ),
    (
        "replicas are not spread over zones",
        _WANTED + "Wanted._by_rank",
        "zones=self._zones",
        "zones={}",
        PLANNER,
    ),
    (
        "a pin to a draining node keeps its replica there",
        _WANTED + "Wanted.nodes",
        " if name in self._weights]",
        "]",
        PLANNER,
    ),
    (
        "what was wanted of other nodes is wanted for ever",
        _WANTED + "Wanted.follow",
        "if (weights, zones) != (self._weights, self._zones):",
        "if False:",
        PLANNER,
    ),
    # Hysteresis.
    (
        "absences of a node that comes and goes add up",
        _PRESENCE + "observe",
        "self._absent_since_ms = {",
        "self._absent_since_ms = self._absent_since_ms | {",
        PLANNER,
    ),
    (
        "a node gets replicas as soon as it is seen",
        _PRESENCE + "settled",
        "if now_ms - since_ms >= ms",
        "if True",
        PLANNER,
    ),
    (
        "a node loses its replicas as soon as it is absent",
        _PRESENCE + "gone",
        "ms and now_ms - since_ms >= ms",
        "ms",
        PLANNER,
    ),
    (
        "a new leader counts on what it saw when it led before",
        _PRESENCE + "forget",
        "self._absent_since_ms, self._present_since_ms = {}, {}",
        "pass",
        PLANNER,
    ),
    (
        "what a restart takes away for a moment is wanted elsewhere",
        _PLANNER + "Planner.follow",
        "frozenset(gone), frozenset(present)",
        "frozenset(state.nodes.keys() - set(present)), frozenset(present)",
        DUTIES,
    ),
    (
        "replicas are replaced while more than one node in four is gone",
        _PLANNER + "Planner.steps",
        "if self._gone and self._totals.too_many_gone(self._state, self._gone, voting=voting):",
        "if False:",
        PLANNER,
    ),
    (
        "a node that died a year ago prevents the replacements of today",
        _PLANNER + "Totals.too_many_gone",
        "abandoned = (set(gone) - holding) | (set(gone) & set(+self.decided))",
        "abandoned = set(gone) & set(+self.decided)",
        VOTERS,
    ),
    # Budgets.
    (
        "a node gets any number of new replicas at a time",
        _BUDGETS,
        "any(filling[node] >= AT_ONCE for node in nodes) or ",
        "",
        PLANNER,
    ),
    (
        "replicas that nothing fills keep others waiting",
        _BUDGETS,
        "counts[stuck]",
        "counts[False]",
        PLANNER,
    ),
    (
        "any number of partitions move at a time",
        _BUDGETS,
        "(voluntary and moving >= MOVES_AT_ONCE)",
        "False",
        PLANNER,
    ),
    (
        "moves that are under way do not count",
        _PLANNER + "Totals.add",
        'any(each.why == "moved" for each in partition.leaving)',
        "False",
        PLANNER,
    ),
    (
        "replacements and growth wait for moves",
        _BUDGETS,
        "voluntary, filling = precedence >= Precedence.DRAIN, counts[stuck]",
        "voluntary, filling = True, counts[stuck]",
        PLANNER,
    ),
    # Nodes that are removed.
    (
        "a node is removed that was not drained",
        _RULES + "remove_node",
        "if not node.draining:",
        "if False:",
        RULES,
    ),
    ("a node is removed that holds replicas", _RULES + "remove_node", "if held:", "if False:", RULES),
    (
        "a node is removed that partitions are pinned to",
        _RULES + "_held_by",
        "or (partition.pin is not None and node.node in partition.pin.nodes)",
        "",
        RULES,
    ),
    (
        "the folder of a removed node comes back",
        _RULES + "remove_node",
        "[*state.removed_stores, node.store_id]",
        "[*state.removed_stores]",
        RULES,
    ),
    (
        "what a removed node would have to report is waited for",
        _RULES + "remove_node",
        "tombstones=state.tombstones.changed(_without_store(state, node.store_id))",
        "tombstones=state.tombstones",
        RULES,
    ),
    # Preferred leaders.
    (
        "a partition's leader is chosen anew each time",
        _LEADERS + "_leader",
        "if partition.preferred_leader in candidates:",
        "if False:",
        LEADERS,
    ),
    (
        "a replica that is not made is preferred",
        _LEADERS + "_candidates",
        "if each.made and not each.lost",
        "if not each.lost",
        LEADERS,
    ),
    (
        "a replica that is lost is preferred",
        _LEADERS + "_candidates",
        "if each.made and not each.lost",
        "if each.made",
        LEADERS,
    ),
    (
        "one node leads more than another for ever",
        _LEADERS + "_Spread.improve",
        "if self._load(node) <= least:",
        "if True:",
        LEADERS,
    ),
    (
        "leaders are not spread by weight",
        _LEADERS + "choosing",
        "_Spread(weights)",
        "_Spread(dict.fromkeys(weights, 1.0))",
        LEADERS,
    ),
    (
        "one choice of leaders has no bound",
        _LEADERS + "choosing",
        "if len(changed) >= MOST_CHANGES:",
        "if False:",
        LEADERS,
    ),
    (
        "what an operator transfers is chosen again",
        _LEADERS + "transfer",
        "return changed | {other: former}",
        "pass",
        LEADERS,
    ),
    (
        "a transfer exchanges a partition though it need not",
        _LEADERS + "transfer",
        "if led[former] / weights[former] >= (led[node] + 1) / weights[node] - 1e-9:",
        "if False:",
        LEADERS,
    ),
    (
        "a transfer gives what the former leader does not hold in exchange",
        _LEADERS + "transfer",
        "if former in _candidates(partition, weights):",
        "if True:",
        LEADERS,
    ),
    (
        "a node is preferred that holds no replica",
        _RULES + "prefer_leaders",
        "if node in [replica.node for replica in partition.replicas]:",
        "if True:",
        RULES,
    ),
    # Commands that came later.
    (
        "a command is enabled though a node's program does not know it",
        "laminar.node.catalog.leader_duties:LeaderDuties._enable_commands",
        "min((node.code_version for node in nodes), default=0)",
        "CODE_VERSION",
        ENABLED,
    ),
    (
        "a code version is disabled by one that is proposed late",
        "membership.replicated:ReplicatedObjects.perform",
        "< self.code_version()",
        "< 0",
        ("tests/membership/test_replicated.py",),
    ),
    # Who votes on the catalog.
    (
        "the catalog's leader takes steps by an old state",
        "laminar.node.catalog.leader_duties:LeaderDuties.run_pass",
        "group.applied_index < replica.log.last_index",
        "group.committed_index < replica.log.last_index",
        ("tests/sim/test_catalog_voters.py",),
    ),
    (
        "a draining node votes on the catalog",
        _VOTERS,
        "unfit = rolled_back | draining | set(gone)",
        "unfit = rolled_back | set(gone)",
        VOTERS,
    ),
    (
        "a draining voter of the catalog is removed before its successor votes",
        _VOTERS,
        "(votes == wanted and voting & draining - set(gone))",
        "False",
        VOTERS,
    ),
    (
        "a draining voter of the catalog waits for a successor that does not come",
        _VOTERS,
        "if spare is None and voting & draining and voting - unfit:",
        "if False:",
        VOTERS,
    ),
    (
        "a draining voter of the catalog does not wait for a successor that is about to come",
        _VOTERS,
        "if name in draining and not waiting and",
        "if name in draining and",
        VOTERS,
    ),
    (
        "a node that was removed stays a member of the catalog's group",
        _VOTERS,
        "if ids and replica_id not in ids and",
        "if False and",
        VOTERS,
    ),
    (
        "a removed node leaves the catalog's group when no majority is left",
        _VOTERS,
        "if ids and replica_id not in ids and majority_active(without := current.without(replica_id)):",
        "if ids and replica_id not in ids and (without := current.without(replica_id)):",
        VOTERS,
    ),
)

PLACEMENT = [
    case(name, where, old, new, tests=tests, tests_only=True) for name, where, old, new, tests in _MUTANTS
]
