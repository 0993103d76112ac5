"""When all answers may let a group go on (docs/consensus.md#when-all-replicas-have-answered)."""

from __future__ import annotations

import msgspec
import pytest

from laminar.node.consensus.lost_majority import LogEnd, agree

FIRST = {1: LogEnd(1, 2, False, 3, 10), 2: LogEnd(2, 1, False, 3, 9)}


def test_a_group_is_released_when_all_answered_twice_alike() -> None:
    """The ends may differ from the first round's: it is the second that counts."""
    later = {**FIRST, 2: LogEnd(2, 1, False, 3, 11)}

    assert agree(FIRST, later)


@pytest.mark.parametrize("change", [{"incarnation": 2}, {"leading": True}, {"replica_id": 7}])
def test_pitfall_34_no_release_when_one_forgot_meanwhile_or_leads(change: dict[str, object]) -> None:
    """It acknowledged, after another's answer, what it has forgotten since; or it may still commit."""
    later = {**FIRST, 2: msgspec.structs.replace(FIRST[2], **change)}

    assert not agree(FIRST, later)


def test_pitfall_34_no_release_when_somebody_is_known_who_was_not_asked_first() -> None:
    """What it acknowledged before it was asked is in no answer."""
    assert not agree(FIRST, {**FIRST, 3: LogEnd(3, 1, False, 3, 10)})
    assert not agree({**FIRST, 3: LogEnd(3, 1, False, 3, 10)}, FIRST)
