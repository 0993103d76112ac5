"""Detection of a stalled peer: one that sends, or reads, too slowly or not at all.

Time is divided into windows. In each the peer must transfer a minimum number of bytes (the *floor*, a rate in
bytes/s). Each connection of a server has a `StallDetector`, and about once a second passes it the time and
the bytes received or sent so far. The detector reads no clock, and knows neither sockets nor answers.
"""

from __future__ import annotations


class StallDetector:
    """The current time window of a connection: when it began, and the byte counters at that time.

    `now_s` is of a monotonic clock; `received` and `drained` are bytes since the connection began.
    """

    __slots__ = ("_drained", "_in_head", "_received", "_since_s", "_writing")

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._received = 0
        self._drained = 0
        self._in_head = False
        self._writing = False

    def restart(self, now_s: float, *, received: int) -> None:
        """Begin a new window at `now_s`, because the connection now waits for another part of a request."""
        self._since_s, self._received, self._in_head = now_s, received, False

    def over(self, now_s: float, *, limit_s: float) -> bool:
        """Return whether the current window has lasted longer than `limit_s`; the window goes on."""
        return now_s - self._since_s > limit_s

    def over_body(self, now_s: float, *, received: int, window_s: float, floor_bytes_per_s: float) -> bool:
        """Return whether the peer sent the body more slowly than the floor, over a window of `window_s`.

        Until the window has lasted `window_s` the result is False. Then the next window begins.
        """
        elapsed_s = now_s - self._since_s
        if elapsed_s <= window_s:
            return False
        slow = received - self._received < floor_bytes_per_s * elapsed_s
        self.restart(now_s, received=received)
        return slow

    def over_head(self, now_s: float, *, limit_s: float) -> bool:
        """Return whether an incomplete head has been waiting for longer than `limit_s`.

        The time counts from the first call for this head; further bytes of the head do not restart it.
        """
        if not self._in_head:
            self._since_s, self._in_head = now_s, True
            return False
        return now_s - self._since_s > limit_s

    def over_idle(self, now_s: float, *, received: int, limit_s: float) -> bool:
        """Return whether nothing has arrived for longer than `limit_s`, between two requests."""
        if self._in_head or received != self._received:
            self.restart(now_s, received=received)
            return False
        return now_s - self._since_s > limit_s

    def over_writing(self, now_s: float, *, drained: int, window_s: float, floor_bytes_per_s: float) -> bool:
        """Return whether the peer read answers more slowly than the floor, over a window of `window_s`.

        Call it while bytes wait to be sent; the first such call begins the first window. Until the window has
        lasted `window_s` the result is False. Then the next window begins.
        """
        if not self._writing:
            self._writing = True
            self._since_s, self._drained = now_s, drained
            return False
        elapsed_s = now_s - self._since_s
        if elapsed_s <= window_s:
            return False
        slow = drained - self._drained < floor_bytes_per_s * elapsed_s
        self._since_s, self._drained = now_s, drained
        return slow

    def written(self) -> None:
        """End the check of how fast the peer reads, because no bytes wait to be sent any more."""
        self._writing = False
