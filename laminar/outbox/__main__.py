"""Print the SQL that creates an outbox: ``python -m laminar.outbox postgresql|sqlite [TABLE]``."""

from __future__ import annotations

import sys

from laminar.client.errors import ConfigError
from laminar.outbox.schema import schema


def main(arguments: list[str]) -> int:
    """Print the SQL statements for the given database and table; return the exit code."""
    try:
        if len(arguments) not in (1, 2):
            raise ConfigError("usage: python -m laminar.outbox postgresql|sqlite [TABLE]", code="invalid")
        print(schema(*arguments), end="")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
