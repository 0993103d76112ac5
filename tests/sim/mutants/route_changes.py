"""The rules of changes of a topic's route in the catalog; nothing proposes one yet, so no seed meets them."""

from __future__ import annotations

from tests.sim.mutants.case import case

RULES = ("tests/membership/test_route_rules.py", "tests/membership/test_any_route_steps.py")

_RULES = "membership.route_rules:"

# By the rule that it breaks: a name, a function, the text and what becomes of it.
_MUTANTS = (
    # Each logical partition belongs to one partition.
    (
        "partitions that are no neighbours are merged",
        "_wrong_change",
        "if any(before.first + before.size != after.first for before, after in pairwise(inputs)):",
        "if False:",
    ),
    (
        "a cut lies outside",
        "_wrong_change",
        "if any(first >= after for first, after in pairwise(bounds)):",
        "if False:",
    ),
    ("several are split at once", "_wrong_change", "if len(inputs) > 1 and request.cuts:", "if False:"),
    (
        "what is sealed is an input again",
        "begin_change",
        "inputs = [each for each in route_of(topic).ranges if each.number in wanted]",
        "inputs = [KeyRange(n, p.first, p.size) for n in sorted(wanted)"
        " if (p := state.partitions.get(f'{topic.name}/{n}')) is not None and p.size]"
        " or [each for each in route_of(topic).ranges if each.number in wanted]",
    ),
    # A number is given once.
    (
        "the numbers of a cancelled change are given again",
        "begin_change",
        "number, replica_id = topic.next_partition or topic.partitions, state.next_replica_id",
        "number, replica_id = topic.all_numbers[-1] + 1, state.next_replica_id",
    ),
    (
        "replica ids are given again",
        "begin_change",
        "next_replica_id=replica_id",
        "next_replica_id=replica_id - 1",
    ),
    (
        "a group's id is given again",
        "_unfit",
        "state.partition_of_group(each) or each.hex() in state.tombstones for each in request.groups",
        "False for each in request.groups",
    ),
    # One change at a time.
    ("two changes at a time", "begin_change", "if topic.change is not None:", "if False:"),
    ("a change of an older route", "begin_change", "if version != request.after:", "if False:"),
    (
        "a change that is asked for again begins again",
        "begin_change",
        "if _was_begun(topic, request):",
        "if False:",
    ),
    # What is closing.
    ("a change closes before its outputs are there", "close_change", "if creating:", "if False:"),
    ("a closing change is cancelled", "cancel_change", 'if change.state != "preparing":', "if False:"),
    (
        "a change that is done is said to be cancelled",
        "cancel_change",
        "if any(each.id == request.id for each in done):",
        "if False:",
    ),
    ("a strict change is forced", "close_change", 'if force and change.order != "weak":', "if False:"),
    # Seals.
    ("a seal before the close", "report_seal", 'if change.state == "preparing":', "if False:"),
    (
        "the route changes before the last seal",
        "report_seal",
        "elif len(sealed.seals) < len(sealed.inputs):",
        "elif len(sealed.seals) < len(sealed.inputs) - 1:",
    ),
    (
        "the last seal leaves the old route",
        "report_seal",
        "elif len(sealed.seals) < len(sealed.inputs):",
        "elif len(sealed.seals) <= len(sealed.inputs):",
    ),
    ("a recorded end changes", "report_seal", "if known is not None:", "if known == request.seal:"),
    (
        "another group reports a seal",
        "report_seal",
        "if partition is None or partition.group != request.group:",
        "if partition is None:",
    ),
    (
        "a partition that is no input reports a seal",
        "report_seal",
        "if change is None or request.number not in [each.number for each in change.inputs]:",
        "if change is None:",
    ),
    # Reclaiming.
    (
        "what is not sealed is reclaimed",
        "reclaim_partition",
        "if not any(request.number in each.seals for each in changes):",
        "if False:",
    ),
    ("reclaimed before what it succeeds", "reclaim_partition", "if before:", "if False:"),
    (
        "reclaimed without a tombstone",
        "_without",
        "tombstones=state.tombstones | stones,",
        "tombstones=state.tombstones,",
    ),
    (
        "what is reclaimed stays listed",
        "_without",
        "topic = replace(topic, listed=[number for number in topic.all_numbers if number not in numbers])",
        "topic = replace(topic, listed=list(topic.all_numbers))",
    ),
    # Bounds.
    (
        "the end of a partition that is there is forgotten",
        "_shortened",
        "while ends > MOST_ENDS and not any(each.number in there for each in changes[first].inputs):",
        "while ends > MOST_ENDS:",
    ),
    ("ends are kept for ever", "_shortened", "while ends > MOST_ENDS and not", "while False and not"),
    ("any number of ends", "_over_quota", "if ends > MOST_KEPT_ENDS:", "if False:"),
    ("any number of partitions", "_over_quota", "if partitions > MOST_PARTITIONS:", "if False:"),
    (
        "an output on a node that is emptied",
        "_unfit",
        "if name not in state.nodes or state.nodes[name].draining)",
        "if name not in state.nodes)",
    ),
)

ROUTE_CHANGES = tuple(
    case(f"route: {name}", _RULES + where, old, new, tests=RULES, tests_only=True)
    for name, where, old, new in _MUTANTS
) + (
    case(
        "route: a deleted topic leaves the outputs of its change",
        "membership.records:CatalogState.partitions_of",
        "for n in record.all_numbers]",
        "for n in range(record.partitions)]",
        tests=RULES,
        tests_only=True,
    ),
    case(
        "route: the outputs of a change under way are shown",
        "membership.records:TopicRecord.numbers",
        "if self.change is None:",
        "if True:",
        tests=(*RULES, "tests/test_listed_numbers.py"),
        tests_only=True,
    ),
    case(
        "route: a step is proposed before every program knows it",
        "membership.catalog:Catalog.change_route",
        "if self.code_version < 3:",
        "if self.code_version < 2:",
        tests=RULES,
        tests_only=True,
    ),
)
