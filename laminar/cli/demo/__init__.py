"""`laminar demo`: three nodes, 20,000 real flights, a kill, a Spark query, and a proof of each promise.

`story` tells it from beginning to end. Its parts know nothing of each other: `flights` (the file, and what is
true of it), `load` (the stream, and the kill half-way), `proof` (what must hold, as pure checks),
`spark_stage` and `spark_query` (the query, in a process of its own), `picture` (what it found).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    file: Annotated[
        Path | None, Parameter(help="Flights, a JSON object a line; else those of the source tree.")
    ] = None,
    out: Annotated[Path, Parameter(help="Where the picture goes, and the nodes' data and logs.")] = Path(
        "demo-out"
    ),
    keep: Annotated[
        bool, Parameter(negative="", help="Keep data and logs; they are kept if a check fails.")
    ] = False,
) -> int:
    """Run it; 0 only if every check held."""
    from laminar.cli.demo.story import run

    return run(file=file, out=out, keep=keep)
