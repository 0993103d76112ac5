"""The tables of an outbox and of a consumer, for each kind of database."""

from __future__ import annotations

from laminar.client.errors import ConfigError
from laminar.outbox.databases import checked_name

_OUTBOX = {
    "postgresql": """\
CREATE TABLE {table} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    value bytea NOT NULL CHECK (octet_length(value) <= 8388608),
    key text,
    tag text,
    headers jsonb CHECK (jsonb_typeof(headers) = 'object'),
    timestamp_ms bigint DEFAULT (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    trace_id text CHECK (trace_id ~ '^[0-9a-fA-F]{{32}}$'),
    deliver_at_ms bigint CHECK (deliver_at_ms >= 0)
);
CREATE TABLE {table}_relay (
    id integer PRIMARY KEY CHECK (id = 1),
    run bigint NOT NULL,
    producer text NOT NULL,
    topic text NOT NULL,
    checkpoint bigint NOT NULL,
    sent bigint NOT NULL,
    claimed text NOT NULL,
    claimed_ms bigint NOT NULL
);
""",
    "sqlite": """\
CREATE TABLE {table} (
    id integer PRIMARY KEY AUTOINCREMENT,
    value blob NOT NULL CHECK (length(CAST(value AS blob)) <= 8388608),
    key text,
    tag text,
    headers text CHECK (json_type(headers) = 'object'),
    timestamp_ms integer DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS integer)),
    trace_id text CHECK (length(trace_id) = 32 AND trace_id NOT GLOB '*[^0-9a-fA-F]*'),
    deliver_at_ms integer CHECK (deliver_at_ms >= 0)
);
CREATE TABLE {table}_relay (
    id integer PRIMARY KEY CHECK (id = 1),
    run integer NOT NULL,
    producer text NOT NULL,
    topic text NOT NULL,
    checkpoint integer NOT NULL,
    sent integer NOT NULL,
    claimed text NOT NULL,
    claimed_ms integer NOT NULL
);
""",
}
_FIRST = "INSERT INTO {table}_relay VALUES (1, 0, '', '', 0, 0, '[]', 0);\n"


def schema(database: str, table: str = "outbox") -> str:
    """Return the SQL that creates an outbox; `database` is ``"postgresql"`` or ``"sqlite"``.

    `table` is the one into which the application inserts; its columns may be in any order, and it may have
    more. ``{table}_relay``, with one row, has the relay's progress.
    """
    try:
        statements = _OUTBOX[database]
    except KeyError:
        raise ConfigError(
            f"no tables are known for {database!r}", code="database", value=database, limit=sorted(_OUTBOX)
        ) from None
    return (statements + _FIRST).format(table=checked_name(table))
