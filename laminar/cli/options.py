"""Options that several commands share: which cluster, and how a list is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from laminar.client.sync.client import Client

CLUSTER = Group("Cluster", sort_key=10)
OUTPUT = Group("Output", sort_key=5)

# A command waits this long for a first answer before it prints a note.
PATIENCE_S = 2.0

Format = Literal["table", "json", "names"]


@Parameter(name="*", group=CLUSTER)
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The options that name the cluster that a command uses, and prove who the client is."""

    url: Annotated[
        str | None,
        Parameter(help="A node, or several with commas. Else LAMINAR_URL, else the current context."),
    ] = None
    token: Annotated[
        str | None,
        Parameter(help="The token. Other users of this machine can see it here, but not in --token-file."),
    ] = None
    token_file: Annotated[
        Path | None,
        Parameter(
            help="A file with the token. Else LAMINAR_TOKEN, LAMINAR_TOKEN_FILE or the context's, "
            "with the cluster found there."
        ),
    ] = None
    ca: Annotated[
        Path | None,
        Parameter(
            help="A PEM file with the CA of the cluster's certificates. Else LAMINAR_CA, the context's, "
            "or the system's CAs."
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        Parameter(
            help="A PEM file with a certificate that says who asks, in place of a token. Else "
            "LAMINAR_CERTIFICATE or the context's."
        ),
    ] = None
    key: Annotated[
        Path | None,
        Parameter(
            name="--certificate-key",
            help="A PEM file with the certificate's key, unless that is in the same file. Else LAMINAR_KEY.",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        Parameter(help="Seconds for each call, over all its retries. [default: 10; produce and consume: 60]"),
    ] = None

    @property
    def proof(self) -> dict[str, Any]:
        """Arguments for token, CA and certificate that `laminar.connect` and `laminar.aio.connect` take."""
        return {
            "token": self.token,
            "token_file": self.token_file,
            "ca": self.ca,
            "certificate": self.certificate,
            "key": self.key,
        }

    @contextmanager
    def connect(self, *, timeout: float = 10.0) -> Iterator[Client]:
        """Open a client of the cluster; `timeout` (seconds) is used unless the user gave one."""
        from laminar.client.sync.client import connect

        seconds = timeout if self.timeout is None else self.timeout
        with connect(self.url, **self.proof, timeout=seconds) as client:
            if seconds > PATIENCE_S:
                warn_if_no_node_answers(client, timeout=seconds)
            yield client


def warn_if_no_node_answers(client: Client, *, timeout: float) -> None:
    """Print a note if no node answers within `PATIENCE_S`: otherwise the command would seem to hang.

    `timeout` in seconds is how long the command goes on trying.
    """
    from laminar.cli.errors import complain
    from laminar.client.errors import Error, Unavailable

    try:
        client.request_json("GET", "/v1/version", timeout=PATIENCE_S)
    except Unavailable as error:
        complain(
            f"{error.message}; trying for {timeout:g} s more. Is a node running? `laminar dev` starts three"
        )
    except Error:
        pass  # a node answers; the command's own request will show what is wrong


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True, kw_only=True)
class Listing:
    """The options that say how a list is printed: as a table, as JSON, or names alone."""

    output: Annotated[
        Format, Parameter(name=["--output", "-o"], help="As a table, as JSON, or names alone.")
    ] = "table"
    json: Annotated[bool, Parameter(negative="", help="Short for -o json.")] = False

    @property
    def format(self) -> Format:
        """Format chosen by the options."""
        return "json" if self.json else self.output


ANY_CLUSTER = Cluster()
AS_TABLE = Listing()
