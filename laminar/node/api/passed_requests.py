"""Requests of clients, and steps of them, that other shards pass on to this one.

The node that took a request has checked its principal's grants, and has recorded it in its audit. Here it
takes turns with the principal's other requests (`PassedTurns`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from laminar.http.api.names import AUDIT_TOPIC, TRACE_TOPIC
from laminar.http.protocol.flows import Flow
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.guard import Guard
from laminar.node.access.principals import ANONYMOUS, Principal
from laminar.node.api.common.forwarding import (
    Forwarder,
    Step,
    ask_for,
    decode_for_principal,
    decode_passed,
    encode_response,
    requester_of,
)
from laminar.node.api.common.passed_turns import PassedTurns
from laminar.node.api.common.services import HostServices
from laminar.node.api.matched import Matched, matched_of
from laminar.node.transport.transport import Peer

# The internal topics that are written by requests of nodes.
_WRITTEN_BY_NODES = frozenset((AUDIT_TOPIC, TRACE_TOPIC))

CarryOut = Callable[[Request, Matched], Response | Awaitable[Response]]
"""Calls the handler of a request that was admitted."""


class PassedRequests:
    """The handlers of requests and steps that other shards pass on."""

    def __init__(
        self, host: HostServices, guard: Guard | None, steps: Mapping[str, Step], *, carry_out: CarryOut
    ) -> None:
        """Create the handlers.

        `steps` are the transport methods that clients' requests call at other shards, by name.
        """
        self._node = host.node
        self._guard = guard
        self._steps = steps
        self._carry_out = carry_out
        self._passed = PassedTurns(lambda: host.turns, in_progress=lambda: host.transport.calls_in_progress)

    async def on_http(self, peer: Peer, payload: bytes) -> Any:
        """Answer a request that another shard passes on."""
        passed = decode_passed(payload)
        head = RequestHead(passed.method, passed.target, passed.headers)
        matched = matched_of(head)
        if matched.operation != "append_to_partition" or matched.params["topic"] not in _WRITTEN_BY_NODES:
            matched.check_system()
        if passed.principal or self._guard is not None:
            head.memo = matched = matched._replace(principal=Principal(passed.principal or ANONYMOUS))
        request = Request(head, passed.body, Forwarder(peer, passed.address))
        who = requester_of(request, self._node)
        ask_for(who, is_passed=True)
        flow = self._flow_of(who.principal)
        if flow is None:
            answer = self._carry_out(request, matched)
            return encode_response(answer if isinstance(answer, Response) else await answer)
        return encode_response(
            await self._passed.answer(flow, len(passed.body), lambda: self._carry_out(request, matched))
        )

    async def on_for_principal(self, peer: Peer, payload: bytes) -> Any:
        """Carry out one step of a client's request that another shard handles."""
        asked = decode_for_principal(payload)
        step = self._steps.get(asked.method)
        if step is None:
            raise LookupError(f"{asked.method!r} is asked for no client")
        ask_for(asked.who(peer), is_passed=True)
        flow = self._flow_of(asked.principal)
        if flow is None:
            return await step(peer, asked.payload)
        return await self._passed.call(flow, len(payload), lambda: step(peer, asked.payload))

    def _flow_of(self, principal: str) -> Flow | None:
        """Return the flow (a principal's fair share) of a forwarded request; None without access control."""
        return None if self._guard is None else self._guard.meter_of(principal).flow
