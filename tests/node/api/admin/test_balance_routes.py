"""The balance over HTTP: what its leader answers, and what is said without one."""

from __future__ import annotations

import msgspec
import pytest

from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.admin.balance import BalanceRoutes
from laminar.node.catalog.messages.answers import BalanceAnswer, CatalogAnswer, NodeBalance
from laminar.node.catalog.messages.requests import BalanceRequest, CatalogRequest
from laminar.node.placement.load import Load
from laminar.node.transport.transport import TransportError
from tests.node.services import Services

FOUND = BalanceAnswer(
    threshold=1.25,
    hours="22-06",
    move="swap_leaders",
    partitions=["t/0", "t/1"],
    because="a has a score of 1.50",
    done=True,
    nodes=[NodeBalance("a", 1.0, Load(1, 2, 3, 4, 5), 1.5, "stored_bytes"), NodeBalance("b", 2.0)],
)


class Catalog(Services):
    """A shard's services with a catalog that has this answer; None: it cannot be reached."""

    def __init__(self, answer: CatalogAnswer | None) -> None:
        super().__init__(elsewhere=["a"])
        self.answer = answer
        self.asked: list[CatalogRequest] = []

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """See `ShardServices`."""
        self.asked.append(request)
        if self.answer is None:
            raise TransportError("lost")
        return self.answer


def asked(method: str) -> Request:
    return Request(RequestHead(method, "/v1/admin/balance", {}), b"", None)  # type: ignore[arg-type]


async def test_the_leaders_answer_is_passed_on_and_only_a_post_acts() -> None:
    services = Catalog(CatalogAnswer(balance=FOUND))
    routes = BalanceRoutes(services)
    shown = await routes.describe(asked("GET"))
    acted = await routes.act(asked("POST"))

    assert services.asked == [BalanceRequest(act=False), BalanceRequest(act=True)]
    assert shown.body == acted.body and isinstance(shown.body, bytes)
    assert msgspec.json.decode(shown.body) == msgspec.to_builtins(FOUND)


@pytest.mark.parametrize("answer", [None, CatalogAnswer(error="no_leader"), CatalogAnswer(error="unknown")])
async def test_without_a_leader_it_is_unknown_whether_a_post_acted(answer: CatalogAnswer | None) -> None:
    routes = BalanceRoutes(Catalog(answer))
    with pytest.raises(Problem) as read:
        await routes.describe(asked("GET"))
    with pytest.raises(Problem) as acted:
        await routes.act(asked("POST"))
    assert ("no_leader", "no_leader") == (read.value.code, acted.value.code)
    assert acted.value.outcome == "unknown"
