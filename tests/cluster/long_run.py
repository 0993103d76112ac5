"""What the long runs on real clusters have in common when they are started by hand: folder, time, verdict."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any


def judged(
    name: str, arguments: str, folder: Path | None, run: Callable[[Path], Coroutine[Any, Any, bool]]
) -> int:
    """Run in `folder`, or in a new one that is removed if all is well; return the exit code.

    `python -m tests.cluster.NAME ARGUMENTS` is printed first, so that the run can be repeated.
    """
    place = folder or Path(tempfile.mkdtemp(prefix=f"laminar-{name}-"))
    place.mkdir(parents=True, exist_ok=True)
    print(f"python -m tests.cluster.{name} {arguments}  ({place})", flush=True)
    began = time.monotonic()
    sound = asyncio.run(run(place))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if not sound:
        print(f"FAILED: see {place}", flush=True)
        return 1
    if folder is None:
        shutil.rmtree(place)
    return 0
