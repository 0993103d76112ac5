"""The `laminar` command.

It may import any package, and none may import it. Each command is a module that is imported when it is
called, and imports the client inside itself, so that `laminar --help` stays quick. Here is what every command
ends with: its exit code, and one line on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are one line on standard error."""
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
        # The reader of our output has seen enough (`| head`). What is left in the buffer is dropped at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except Exception as error:
        from laminar.cli.errors import report

        code = report(error)
        if code is None:
            raise
        return code


def main() -> None:
    """Parse the arguments, run one command, and exit with its code. The console script."""
    sys.exit(run(sys.argv[1:]))
