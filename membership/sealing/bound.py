"""The form of gossip datagrams with replay protection: each is for one process, which accepts it once.

No clock is used, so a wrong one can't split a cluster. A datagram names the process that sent it, by an id
drawn at its start, and numbers the datagrams of that process. It also repeats a *nonce* that its receiver has
asked this sender for. A receiver accepts a datagram with its own nonce and a number that it has not had. It
answers any other with a *challenge*, which has the nonce to use; the sender then sends the same content once
more. So

1. a recorded datagram that is sent again is dropped, because its number was received before;
2. a datagram for another process, or for an earlier start of this one, has another nonce;
3. a sender that has started again is accepted after one challenge; recorded datagrams of its earlier start
   are not, because that process can no longer answer the challenge.

A challenge is smaller than the datagram that it answers, and is itself authenticated; no challenge is
answered by another. It has an effect only once, and only while its receiver remembers the datagram that it
names.

Pure: no socket, clock or randomness but the bytes that it is given. ``docs/protocol.md`` has every byte.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAGIC, CHALLENGE_MAGIC = b"LMG2", b"LMC2"
MAC_BYTES = 16
ID_BYTES = 8
NONCE_BYTES = 16
WINDOW = 1_024
"""Datagrams of one sender may come in another order, by as many as these."""
MOST_SENDERS = 4_096
MOST_SENT = 256
"""The last datagrams that are sent again when they are challenged."""

# Sender (in a challenge: for whom it is), number, nonce.
_HEAD = struct.Struct(f">{ID_BYTES}sQ{NONCE_BYTES}s")
HEAD_BYTES = len(MAGIC) + MAC_BYTES + _HEAD.size
_NONE = bytes(NONCE_BYTES)


class Opened(NamedTuple):
    """The result of checking a datagram: its `body`, if it is accepted, else None.

    `send` is an address and a datagram to send there, such as a challenge. `outcome` is the name of the
    counter of the reason, if there is no body.
    """

    body: bytes | None = None
    send: tuple[str, bytes] | None = None
    outcome: str = ""


class _Window:
    """The numbers received from one sender: the highest, and a bit for each of the `WINDOW` before it."""

    __slots__ = ("had", "highest", "nonce")

    def __init__(self, nonce: bytes) -> None:
        self.nonce = nonce
        self.highest = 0
        self.had = 0

    def takes(self, number: int) -> bool:
        """Record a datagram's number; return whether it is new (not too old, and not received before)."""
        if number > self.highest:
            self.had = (self.had << (number - self.highest) | 1) if number - self.highest < WINDOW else 1
            self.had &= (1 << WINDOW) - 1
            self.highest = number
            return True
        bit = 1 << (self.highest - number)
        if self.highest - number >= WINDOW or self.had & bit:
            return False
        self.had |= bit
        return True


class BoundForm:
    """Makes (`close`) and checks (`open`) the datagrams of one process.

    `keys` returns the present keys: the first is used, all are accepted. `draw` returns random bytes that no
    one can foresee.
    """

    def __init__(self, keys: Callable[[], Sequence[bytes]], draw: Callable[[int], bytes]) -> None:
        self._keys = keys
        self._draw = draw
        self._id = draw(ID_BYTES)
        self._number = 0
        self._own = draw(32)
        # By address: the nonce that the process there asks for.
        self._asked: dict[str, bytes] = {}
        # By number: address and content, which is None once it was sent again.
        self._sent: dict[int, tuple[str, bytes | None]] = {}
        self._heard: dict[bytes, _Window] = {}

    def close(self, body: bytes, address: str) -> bytes:
        """Return the datagram that carries the body to an address."""
        return self._closed(body, address, again=False)

    def _closed(self, body: bytes, address: str, *, again: bool) -> bytes:
        self._number += 1
        self._sent[self._number] = address, None if again else body
        if len(self._sent) > MOST_SENT:
            del self._sent[next(iter(self._sent))]
        head = _HEAD.pack(self._id, self._number, self._asked.get(address, _NONE))
        return _with_mac(self._keys()[0], MAGIC, head + body)

    def open(self, data: bytes, sender: str) -> Opened:
        """Check a datagram of this form, received from the address `sender`; return the result."""
        if len(data) < HEAD_BYTES or not self._is_authentic(data):
            return Opened(outcome="bad_signature")
        process, number, nonce = _HEAD.unpack_from(data, len(MAGIC) + MAC_BYTES)
        if data[: len(MAGIC)] == CHALLENGE_MAGIC:
            return self._challenged(process, number, nonce)
        if process == self._id:
            return Opened(outcome="replayed")  # what this process has sent itself
        window = self._heard.get(process)
        if window is None or not hmac.compare_digest(window.nonce, nonce):
            asked = self._nonce_for(process)
            if not hmac.compare_digest(asked, nonce):
                head = _HEAD.pack(process, number, asked)
                challenge = _with_mac(self._keys()[0], CHALLENGE_MAGIC, head)
                return Opened(send=(sender, challenge), outcome="challenged")
            window = window or _Window(nonce)
            window.nonce = nonce
        if not window.takes(number):
            return Opened(outcome="replayed")
        self._keep(process, window)
        return Opened(body=data[HEAD_BYTES:])

    def _challenged(self, process: bytes, number: int, nonce: bytes) -> Opened:
        """Process a challenge: store the nonce that it asks for; return the datagram to send again."""
        sent = self._sent.pop(number, None) if process == self._id else None
        if sent is None:
            return Opened(outcome="replayed")
        address, body = sent
        self._asked.pop(address, None)
        self._asked[address] = nonce
        if len(self._asked) > MOST_SENDERS:
            del self._asked[next(iter(self._asked))]
        if body is None:
            return Opened(outcome="challenged")
        return Opened(send=(address, self._closed(body, address, again=True)), outcome="asked_again")

    def _keep(self, process: bytes, window: _Window) -> None:
        self._heard.pop(process, None)
        self._heard[process] = window  # last is who was heard last
        if len(self._heard) > MOST_SENDERS:
            del self._heard[next(iter(self._heard))]
            # Else the datagrams of the forgotten one would be new again: its nonce would still be right.
            self._own = self._draw(32)

    def _nonce_for(self, process: bytes) -> bytes:
        return hmac.digest(self._own, process, "sha256")[:NONCE_BYTES]

    def _is_authentic(self, data: bytes) -> bool:
        magic, mac, rest = data[:4], data[4 : 4 + MAC_BYTES], data[4 + MAC_BYTES :]
        return any(hmac.compare_digest(_mac(key, magic, rest), mac) for key in self._keys())


def _with_mac(key: bytes, magic: bytes, rest: bytes) -> bytes:
    return b"".join((magic, _mac(key, magic, rest), rest))


def _mac(key: bytes, magic: bytes, rest: bytes) -> bytes:
    return hmac.digest(key, magic + rest, "sha256")[:MAC_BYTES]
