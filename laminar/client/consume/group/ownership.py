"""Which partitions a member claims and releases now, as `policy.assignment` says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from laminar.client.consume.group.cursor_view import GATE_PAUSE_S, CursorView
from laminar.client.consume.group.held_partitions import HeldPartitions
from laminar.client.consume.group.membership import RENEW_S, Membership
from laminar.client.consume.group.partition_leases import NOT_NOW
from laminar.client.policy.assignment import Place, moves

# How often a member that waits for a partition checks whether another has released it.
HANDOVER_CHECK_S = 0.2


class Ownership:
    """Makes the partitions that a member holds those that are assigned to it."""

    def __init__(
        self, *, membership: Membership, view: CursorView, held: HeldPartitions[Any], wake: asyncio.Event
    ) -> None:
        self._membership = membership
        self._view = view
        self._held = held
        self._wake = wake

    async def keep_moving(self) -> None:
        """Claim and release partitions, until an error that is permanent; at once when `wake` is set."""
        while True:
            waits = False
            self._wake.clear()
            with contextlib.suppress(*NOT_NOW):
                waits = await self.move()
            pause_s = HANDOVER_CHECK_S if waits else min(RENEW_S, self._view.looks_at_s - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s, GATE_PAUSE_S)):
                    await self._wake.wait()

    async def move(self) -> bool:
        """Claim and release partitions as far as possible now; return whether more is to be done soon."""
        membership, view, held = self._membership, self._view, self._held
        if time.monotonic() >= membership.valid_until_s:
            return False
        me = membership.id
        if membership.mode == "clustering":
            await asyncio.gather(*(held.own_again(lease) for lease in list(held.leases.values())))
            await membership.leave_as_former({lease.owner for lease in held.leases.values()})
        looked = await view.is_due(me, held.leases)
        if looked:
            await view.look(me)
            self._compare(me)
        await asyncio.gather(*(held.commit_passed(lease) for lease in list(held.leases.values())))
        known, wants = view.known, view.wanted(me, view.known.readable(view.partitions))
        if membership.mode == "broadcast":
            claims = {each: known.place(each).owner for each in wants - held.leases.keys()}
            waits = False
            held.leave(frozenset(each for each in held.leases if known.is_drained(each)))
        else:
            # Partitions that this member owns without knowing it, by a claim whose answer was lost. No other
            # member can release them.
            strays = {each for each, place in known.places.items() if place.owner == me}
            strays -= held.leases.keys()
            plan = moves(
                me,
                held=held.leases,
                wants=wants | strays,
                places=known.places,
                members=membership.members,
            )
            claims, waits = dict(plan.claim) if looked else {}, plan.waits
            held.leave(plan.release)
        for lease in held.leases.values():
            held.note_end(lease)
        await asyncio.gather(*(held.commit_end(lease) for lease in list(held.leases.values())))
        steps = [held.claim(each, known.place(each), owner, me) for each, owner in claims.items()]
        steps += [
            held.give_back(lease) for lease in list(held.leases.values()) if lease.leaving_s is not None
        ]
        await asyncio.gather(*steps)
        refused = bool(claims.keys() - held.leases.keys())
        view.plan_next_look(me, refused=refused)
        leaving = any(lease.leaving_s for lease in held.leases.values())
        return waits or leaving or (len(claims) > 0 and not (refused and membership.route))

    def _compare(self, me: str) -> None:
        """Drop leases of partitions that have another owner by now. Call it right after a look."""
        for lease in list(self._held.leases.values()):
            place = self._view.known.place(lease.partition)
            if place.owner in (lease.owner, me):
                continue
            if self._membership.mode == "broadcast" and (place.position is None or not _is_free(place)):
                self._held.lose(lease, None)
            else:
                self._held.drop(lease)


def _is_free(place: Place) -> bool:
    """Return whether no member owns the partition: it has no owner, or a rewind owns it."""
    return place.rewound or not place.owner
