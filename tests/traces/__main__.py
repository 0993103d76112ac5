"""Print calls, files and moves of each journey; with `--path NAME` the files of one in order."""

from __future__ import annotations

import argparse

from tests.traces.journeys import JOURNEYS, trace_of


def main() -> None:
    """Print the table, or one path."""
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description=__doc__)
    parser.add_argument("--path", choices=[*JOURNEYS], help="print the files of one journey in order")
    options = parser.parse_args()
    if options.path:
        print("\n".join(trace_of(options.path).path()))
        return
    print(f"{'journey':<10} {'calls':>6} {'files':>6} {'moves':>6}")
    for journey in JOURNEYS:
        figures = trace_of(journey).figures()
        print(f"{journey:<10} {figures.calls:>6} {figures.files:>6} {figures.moves:>6}")


if __name__ == "__main__":
    main()
