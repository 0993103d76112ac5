"""A change of the wanted placement is decided on this shard's view, which may be older than the catalog."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from laminar.http.api.problems import Problem
from laminar.node.api.common.placement_call import ATTEMPTS, PlacementCall
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest, PlacementRequest
from laminar.node.transport.transport import TransportError
from membership.placement_rules import change_placement
from membership.records import CatalogState
from membership.requests import AlterNode, ChangePlacement, PlacementChange
from tests.membership.nodes import state_of
from tests.node.services import Services


class Catalog(Services):
    """A shard's services with a catalog of the real rules; the view follows it on request only."""

    def __init__(self, state: CatalogState, *, errors: list[str] | None = None) -> None:
        """Begin with a view of `state`; each of `errors` is the answer to one request, "" none."""
        super().__init__(elsewhere=["a"])
        self.state = state
        self.asked = 0
        self._errors = errors or []
        self.show()

    def show(self) -> None:
        """Make the view as new as the catalog."""
        assert self.view.message is not None
        self.view.message.catalog = self.state

    def change(self, change: PlacementChange) -> None:
        """Change the catalog, and not the view."""
        self.state, result = change_placement(self.state, ChangePlacement(change))
        assert result.ok, result

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """See `ShardServices`."""
        assert isinstance(request, PlacementRequest)
        self.asked += 1
        error = self._errors.pop(0) if self._errors else ""
        if error == "lost":
            raise TransportError("lost")
        if error:
            return CatalogAnswer(error=error, detail="why", value=3, limit=1)
        self.state, result = change_placement(self.state, ChangePlacement(request.change))
        return CatalogAnswer(result=result)

    async def refresh_view(self) -> None:
        """See `ShardServices`."""
        self.show()

    async def view_change(self, timeout_s: float) -> bool:
        """See `ShardServices`."""
        self.show()
        return True

    def draining(self) -> AlterNode:
        """Return the change that drains node a, decided on the view."""
        return AlterNode("a", self.view.nodes()["a"].version, draining=True)


def absent() -> Problem:
    return Problem("no_such_node")


async def test_a_change_that_was_decided_on_an_old_view_is_decided_again() -> None:
    """And is done once: its caller sees it in the view when it is answered."""
    catalog = Catalog(state_of(*"abc"))
    catalog.change(AlterNode("a", 0, set_weight=2.0))

    result = await PlacementCall(catalog).change(catalog.draining, absent=absent)

    assert ("updated", 2) == (result.outcome, catalog.asked)
    node = catalog.view.nodes()["a"]
    assert (True, 2.0) == (node.draining, node.set_weight)


async def test_a_change_that_never_comes_first_is_given_up() -> None:
    """As is one whose view never follows."""
    catalog = Catalog(state_of(*"abc"))

    with pytest.raises(Problem, match="other changes came first") as refused:
        await PlacementCall(catalog).change(lambda: AlterNode("a", 99, draining=True), absent=absent)

    assert ("in_progress", "not_applied", ATTEMPTS) == (
        refused.value.code,
        refused.value.outcome,
        catalog.asked,
    )


async def test_one_change_is_not_decided_again() -> None:
    """Its caller names the version that a client has seen: another client's change is not undone."""
    catalog = Catalog(state_of(*"abc"))
    seen = catalog.draining()
    catalog.change(AlterNode("a", 0, set_weight=2.0))

    result = await PlacementCall(catalog).once(seen, absent=absent)

    assert ("conflict", 1) == (result.outcome, catalog.asked)
    assert not catalog.state.nodes["a"].draining


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        ("lost", "no_leader", "unknown"),
        ("no_leader", "no_leader", "unknown"),
        ("unknown", "no_leader", "unknown"),
        ("not_enabled", "not_enabled", "not_applied"),
        ("node_in_use", "node_in_use", "not_applied"),
        ("too_few_nodes", "too_few_nodes", "not_applied"),
    ],
)
async def test_what_the_catalog_refuses_is_a_problem_of_its_own(error: str, code: str, outcome: str) -> None:
    """Where the answer is lost, the change may have been made."""
    catalog = Catalog(state_of(*"abc"), errors=[error])

    with pytest.raises(Problem) as refused:
        await PlacementCall(catalog).change(catalog.draining, absent=absent)

    assert (code, outcome) == (refused.value.code, refused.value.outcome)


async def test_what_is_gone_or_not_allowed_is_refused() -> None:
    catalog = Catalog(replace(state_of(*"abc"), version=10))
    call = PlacementCall(catalog)

    with pytest.raises(Problem) as gone:
        await call.change(lambda: AlterNode("x", 0, draining=True), absent=absent)
    with pytest.raises(Problem) as wrong:
        await call.change(lambda: AlterNode("a", 0, set_weight=-1.0), absent=absent)

    assert ("no_such_node", "invalid") == (gone.value.code, wrong.value.code)
