"""What a principal may do, of one name and of many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.api.roles import What, allows
from laminar.node.access import principals
from laminar.node.access.principals import Principal
from membership.records import Grant

NAMES = st.text("_ab.", min_size=1, max_size=4)
GRANTS = st.lists(
    st.builds(Grant, st.sampled_from(["read", "write", "admin", "metrics"]), st.text("_ab.", max_size=3)),
    max_size=5,
)


@given(
    grants=GRANTS,
    names=st.lists(NAMES, unique=True),
    what=st.sampled_from(["describe", "read", "write", "admin"]),
    within=st.text("_ab.", max_size=2),
)
def test_among_many_names_are_those_that_may_be_used(
    grants: list[Grant], names: list[str], what: What, within: str
) -> None:
    """As if each were asked for."""
    principal = Principal("p", grants)
    expected = [name for name in names if name.startswith(within) and principal.may(what, name)]

    assert expected == list(principal.among(names, what, within=within))


def test_a_list_of_all_topics_looks_at_the_grants_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each: 64 grants and 100,000 topics would keep a process busy for seconds."""
    looked: list[str] = []

    def counting(grants: list[Grant], what: What, name: str) -> bool:
        looked.append(name)
        return allows(grants, what, name)

    monkeypatch.setattr(principals, "allows", counting)
    principal = Principal("p", [Grant("read", f"a{number:02}") for number in range(64)])
    names = [f"a{number:03}" for number in range(1_000)]

    assert names[:640] == list(principal.among(names, "describe", within=""))
    assert len(looked) < 10
