"""The demo: three nodes, 20,000 real flights, a kill, a Spark query, and a check of each promise.

`run` leads through it from beginning to end. Its parts know nothing of each other: `flights` (the file, and
what is true of it), `load` (the stream, and the kill half-way), `checks` (what must hold, as pure functions),
`spark_stage` and `spark_query` (the query, in a process of its own), `chart` (a picture of what the query
found).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.demo.flights import BadFile
from examples.demo.run import run


def main() -> int:
    """Run the demo; return 0 only if every check held."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--file", type=Path, help="flights, a JSON object a line; examples/data if left out")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of picture, data and logs")
    parser.add_argument("--keep", action="store_true", help="keep data and logs, also if all checks hold")
    options = parser.parse_args()
    try:
        return run(file=options.file, out=options.out, keep=options.keep)
    except BadFile as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
