"""A rate limit for log lines that a remote peer can cause."""

from __future__ import annotations

import logging
from collections.abc import Callable

LINES = 5
PERIOD_S = 60.0


class LimitedLog:
    """A logger that writes at most `LINES` lines of each kind in `PERIOD_S`.

    The next line that is written is preceded by one that says how many were dropped.
    """

    def __init__(self, log: logging.Logger, *, now_s: Callable[[], float]) -> None:
        self._log = log
        self._now_s = now_s
        # By kind: when its period began, lines since then, lines left out.
        self._kinds: dict[str, tuple[float, int, int]] = {}

    def warning(self, kind: str, text: str, *arguments: object) -> None:
        """Log as `Logger.warning` does, within the limit of `kind`.

        Each kind is kept in memory for good, so pass one of a few constants, never text from a peer.
        """
        now_s = self._now_s()
        began_s, lines, left_out = self._kinds.get(kind, (now_s, 0, 0))
        if now_s - began_s >= PERIOD_S:
            began_s, lines = now_s, 0
        if lines >= LINES:
            self._kinds[kind] = began_s, lines, left_out + 1
            return
        if left_out:
            self._log.warning("%d more lines of the kind `%s` were left out", left_out, kind)
        self._kinds[kind] = began_s, lines + 1, 0
        self._log.warning(text, *arguments)
