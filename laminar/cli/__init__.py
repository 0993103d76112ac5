"""The `laminar` command.

It may import any package, and no package may import it. The module of a command is imported when the command
is called, and its functions import the client, so that `laminar --help` is quick. This module runs a command
line, prints its error as one line on standard error, and returns its exit code.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED

COLLECT_AFTER = 20_000
"""Objects made and not freed between two collections of garbage. Most of the time of a command is that of its
imports, which leave no garbage; with Python's 700 a tenth of that time went into collections."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is printed as one line on standard error."""
    try:
        from laminar.cli.app import app

        result = app(arguments, result_action="return_value")
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_DONE
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The program that reads our output has ended (`| head`). What is left in the buffer is dropped at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except Exception as error:
        from laminar.cli.errors import report

        code = report(error)
        if code is None:
            raise
        return code


def main() -> None:
    """Run the command line of this process, and exit with its code. It is the console script `laminar`."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    sys.exit(run(sys.argv[1:]))
