"""The `laminar` command.

It stands above everything else in the house: it may import any package, and none may import it. What a
command needs is imported inside that command, so that `laminar --help` stays quick.
"""

from __future__ import annotations

from importlib.metadata import version

import cyclopts

app = cyclopts.App(
    name="laminar",
    help="A replicated log and message queue.",
    version=lambda: version("laminar-mq"),
    version_flags=["--version"],
)


def main() -> None:
    """The console script: parse the arguments, run one command, exit with its code."""
    app()
