"""The turns of a server's loop, which the flows of requests share (`laminar.http.protocol.flows`).

A flow may begin `TURN` requests, or `ALONE` if no other has a connection. Then its connections wait, and are
read no further, until the next turn. That one comes when the loop has looked at all other sockets: so what
another flow sends is begun after a turn or two of each flow, however many connections these have, and however
much they send. Answers that become due later count, too: one sync of a log may make hundreds of them due.

A turn ends when a flow has used up its share, not with each pass of the loop: as long as none does, nothing
is done here. So a flow may wait for one pass of the loop that did not have to; that costs it microseconds.
One that is alone mostly waits for nothing: the next turn begins when half of its share is used up, while it
goes on with the other half. Between two turns it still begins no more than its share.
"""

from __future__ import annotations

import asyncio

from laminar.http.protocol.flows import ALONE, REFUSED_TURN, REQUEST, TURN, Flow, Waiting


class _Passed:
    """A request that waits for its flow's turn, and came on no connection of its own."""

    __slots__ = ("_cost", "_flow", "_turns", "woken")

    def __init__(self, turns: Turns, flow: Flow, cost: int) -> None:
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns = turns
        self._flow = flow
        self._cost = cost

    def take_turn(self) -> None:
        """Continue the request, soon."""
        if not self.woken.done():  # otherwise it was cancelled
            self._flow.woken += 1
            self._turns.take(self._flow, self._cost)
            self.woken.set_result(None)


class Turns:
    """The flows of one server that have used up their share of the present turn.

    A flow's requests begin in the order in which they came: those of one connection, and those that were
    passed on from elsewhere (`turn`).
    """

    __slots__ = ("_due", "flows", "turns", "waits")

    def __init__(self) -> None:
        self._due: list[Flow] = []  # what they have left is filled up when the next turn begins
        self.flows = 0  # those that have a connection, or requests that were passed on
        self.turns = 0
        self.waits = 0

    def join(self, flow: Flow) -> None:
        """Count one more connection of a flow."""
        flow.connections += 1
        self.flows += flow.connections == 1 and not flow.passed

    def leave(self, flow: Flow) -> None:
        """Count one connection less."""
        flow.connections -= 1
        self.flows -= flow.connections == 0 and not flow.passed

    def enter(self, flow: Flow) -> None:
        """Count one more request of a flow that was passed on."""
        flow.passed += 1
        self.flows += flow.passed == 1 and not flow.connections

    def exit(self, flow: Flow) -> None:
        """Count one request less that was passed on."""
        flow.passed -= 1
        self.flows -= flow.passed == 0 and not flow.connections

    def take(self, flow: Flow, cost: int) -> None:
        """Take `cost` (in answers) from a flow's share; if that uses it up, the next turn begins soon."""
        flow.left -= cost
        if flow.left <= flow.renewed_at:
            if flow.left <= 0:
                self.end(flow)
            else:
                self._await_next(flow)

    async def turn(self, flow: Flow, cost: int) -> None:
        """Wait until the flow has a share of a turn left, and take `cost` (in answers) from it."""
        if not (flow.is_spent or flow.waiting or flow.woken):
            self.take(flow, cost)
            return
        if not flow.is_spent:  # those that were woken come first
            self.end(flow)
        passed = _Passed(self, flow, cost)
        self.wait(flow, passed)
        try:
            await passed.woken
        finally:
            if not passed.woken.cancelled():
                flow.woken -= 1

    def end(self, flow: Flow) -> None:
        """Note that a flow has used up its share of the turn; the next one begins soon."""
        flow.is_spent = True
        self._await_next(flow)

    def _await_next(self, flow: Flow) -> None:
        """Have the next turn begin soon, and fill up what the flow has left."""
        if flow.is_due:
            return
        flow.is_due = True
        if not self._due:
            asyncio.get_running_loop().call_soon(self._next)
        self._due.append(flow)

    def wait(self, flow: Flow, connection: Waiting) -> None:
        """Queue a connection for the next turn of a flow that has used up its share."""
        assert flow.is_spent, f"a flow with {flow.left} answers left"
        self.waits += 1
        flow.waiting.append(connection)

    def _next(self) -> None:
        """Begin a turn: what waits of each flow continues, in the order in which it began to wait."""
        self.turns += 1
        due, self._due = self._due, []
        is_alone = self.flows <= 1
        for flow in due:
            share = REQUEST * (ALONE if is_alone else REFUSED_TURN if flow.muted else TURN)
            # What a large body took of coming turns is given back turn by turn.
            flow.left = min(share, flow.left + share)
            flow.renewed_at = share // 2 if is_alone else 0
            flow.is_spent = flow.is_due = False
        for flow in due:
            for _ in range(len(flow.waiting)):
                if flow.left <= 0:
                    break
                flow.waiting.popleft().take_turn()
            if flow.left <= 0 and not flow.is_spent:
                self.end(flow)
