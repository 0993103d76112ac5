"""Exit codes of `laminar`: 0 done, 1 failed, 2 used wrongly, 3 done in part, 4 no node can do it now."""

from __future__ import annotations

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_PARTLY, EXIT_UNAVAILABLE = range(5)
EXIT_INTERRUPTED = 130
