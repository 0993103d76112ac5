"""``python -m laminar.node``: a node, for a program that starts one, as `laminar.testing` does.

It takes the settings that `laminar serve` takes, from flags with a value each and from the environment. It
has no help, no file of settings and no library for command lines, whose import takes a quarter of a node's
start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from laminar.node.host.settings import Settings, SettingsError
from laminar.node.host.settings_sources import load
from laminar.node.start import EXIT_USAGE, serve


def settings_of(arguments: Sequence[str]) -> Settings:
    """Return the settings of flags (``--name value ...``) and environment.

    Raises:
        SettingsError: a setting is unknown, or has no value or a wrong one.
    """
    if len(arguments) % 2:
        raise SettingsError("has no value", name=arguments[-1], origin=arguments[-1])
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    flags = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    return load(config=None, environ=os.environ, flags=flags).settings


def main(arguments: Sequence[str]) -> int:
    """Run a node until SIGTERM; return the exit code. A wrong setting is one line on standard error."""
    try:
        settings = settings_of(arguments)
    except SettingsError as error:
        print(f"laminar: {error}", file=sys.stderr)
        return EXIT_USAGE
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
