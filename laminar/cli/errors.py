"""Errors as one line for a person and one exit code for a script."""

from __future__ import annotations

import sys

from laminar.batch import BatchError
from laminar.cli.exit_codes import EXIT_FAILED, EXIT_PARTLY, EXIT_UNAVAILABLE, EXIT_USAGE
from laminar.client.errors import ConfigError, Error, Overloaded, ProduceError, Unavailable

# Hints of the server that name HTTP requests, and what to say instead: commands.
HINTS = {
    "no_such_topic": "`laminar topic list` shows what there is, `laminar topic create` makes one",
    "already_exists": "`laminar topic describe` or `laminar channel describe` shows it",
    "no_such_channel": "`laminar channel list` shows what there is, `laminar channel create` makes one",
    "node_in_use": "`laminar node describe` shows what is on it",
    "no_such_operation": "`laminar operations list` shows what is under way",
    "not_cancellable": "`laminar topic alter` changes a number of replicas, `laminar partition move` a place",
    "offset_expired": "--on-expired earliest goes on at the earliest record that is left",
    "unauthorized": "give a token: --token-file, LAMINAR_TOKEN_FILE or LAMINAR_TOKEN, or a context with a "
    "token. A token of the environment or of a context is not sent to a --url of another host",
    "forbidden": "`laminar whoami` shows what your token permits; an admin can make a token with more grants",
    "no_such_token": "`laminar token list` shows what there is",
    "too_few_nodes": "start more nodes, ask for fewer --replicas, or give --allow-fewer-replicas. Without "
    "--replicas, and for `_transactions`, the nodes' setting default_replicas applies",
    "no_such_partition": "`laminar topic describe` shows the partitions",
    "no_such_cursor": "`laminar cursor list` shows what there is",
    "no_such_sink": "`laminar sink list` shows what there is",
    "no_such_node": "`laminar node list` shows what there is",
    "no_such_delayed_record": "`laminar delayed list` shows the pending ones",
    "no_such_route": "`laminar topic route` shows the present route",
}


class UsageError(Exception):
    """The command was used in a way that cannot work; nothing was done."""


class Failed(Exception):
    """The command did not do what it should; `code` is the exit code."""

    def __init__(self, message: str, *, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code


def line_of(error: Error) -> str:
    """Return ``code: message (field=…, value=…, limit=…); hint`` on one line, without unknown parts."""
    facts = [
        f"{name}={value}"
        for name, value in (("field", error.field), ("value", error.value), ("limit", error.limit))
        if value is not None
    ]
    text = f"{error.code}: {error.message}"
    if facts:
        text += f" ({', '.join(facts)})"
    hint = HINTS.get(error.code) or error.hint
    if hint:
        text += f"; {hint}"
    return " ".join(text.split())


def code_of(error: Error) -> int:
    """Return the exit code for an error of the client."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, Unavailable) or (isinstance(error, Overloaded) and error.retriable):
        return EXIT_UNAVAILABLE
    return EXIT_PARTLY if isinstance(error, ProduceError) else EXIT_FAILED


def complain(text: str) -> None:
    """Print one line on standard error."""
    print(f"laminar: {text}", file=sys.stderr, flush=True)


def report(error: Exception) -> int | None:
    """Print the error and return its exit code; None for an unexpected error, whose traceback is shown."""
    if isinstance(error, Error):
        complain(line_of(error))
        return code_of(error)
    if isinstance(error, BatchError):
        past = f"; --on-damage skip goes on at {error.offsets[1]}" if error.offsets else ""
        complain(f"unreadable: {error}{past}")
        return EXIT_FAILED
    if isinstance(error, UsageError):
        complain(str(error))
        return EXIT_USAGE
    if isinstance(error, Failed):
        complain(str(error))
        return error.code
    if isinstance(error, OSError):
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return EXIT_FAILED
    return None
