"""The nodes that `connect` begins with: its argument, else the environment, else the command line's context.

The context file is only read here; ``laminar context`` writes it. Its form is::

    current = "dev"
    [contexts.dev]
    urls = ["http://127.0.0.1:7070"]
    token = "..."  # optional
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laminar.client.errors import ConfigError
from laminar.http.protocol.answer import Target

DEFAULT_URL = "http://127.0.0.1:7070"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The URLs of the nodes to begin with, and the client's token, which is left out of the repr.

    `origin` says where the URLs were found.
    """

    urls: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    origin: str = "argument"

    def may_hear_token(self, url: str) -> bool:
        """Return whether the token may be sent to `url`.

        It may be sent only to hosts that `urls` name, at any port, and never without TLS if `urls` has https.
        """
        asked = Target.of(url)
        return any(
            (named.host, named.path) == (asked.host, asked.path) and (asked.tls or not named.tls)
            for named in map(Target.of, self.urls)
        )


def context_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the context file: ``LAMINAR_CONFIG`` if it is set, else by the XDG rules."""
    named = environment.get("LAMINAR_CONFIG")
    if named:
        return Path(named)
    home = environment.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "laminar" / "config.toml"


def resolve(
    url: str | Sequence[str] | None,
    token: str | None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Endpoints:
    """Return where to connect: argument, ``LAMINAR_URL``, current context, or localhost.

    Several URLs in one string are separated by commas. If `url` is given, the nodes get the `token` that is
    given with it. They get ``LAMINAR_TOKEN`` only if they are hosts of ``LAMINAR_URL``: otherwise an
    untrusted URL could obtain the token of another cluster.

    Raises:
        ConfigError: a text is not the URL of a node, or none is given.
    """
    given = os.environ if environment is None else environment
    if url is not None:
        found = Endpoints(_urls(url, "url"), token)
        if token is None and given.get("LAMINAR_TOKEN") and given.get("LAMINAR_URL"):
            own = Endpoints(_urls(given["LAMINAR_URL"], "LAMINAR_URL"))
            if all(map(own.may_hear_token, found.urls)):
                return Endpoints(found.urls, given["LAMINAR_TOKEN"])
        return found
    token = token if token is not None else given.get("LAMINAR_TOKEN") or None
    if given.get("LAMINAR_URL"):
        return Endpoints(_urls(given["LAMINAR_URL"], "LAMINAR_URL"), token, "LAMINAR_URL")
    path = context_file(given)
    context = _current_context(path)
    if context is None:
        return Endpoints((DEFAULT_URL,), token, "default")
    own_token = context.get("token")
    return Endpoints(
        _urls(context.get("urls") or context.get("url") or "", str(path)),
        token if token is not None else (str(own_token) if own_token else None),
        str(path),
    )


def _urls(given: str | Sequence[str], origin: str) -> tuple[str, ...]:
    found = given.split(",") if isinstance(given, str) else [str(each) for each in given]
    urls = tuple(_with_scheme(url.strip().rstrip("/")) for url in found if url.strip())
    if not urls:
        raise ConfigError(f"{origin} names no node", code="no_url", field=origin)
    for url in urls:
        try:
            Target.of(url)
        except ValueError as fault:
            raise ConfigError(
                str(fault),
                code="bad_url",
                field=origin,
                value=url,
                hint="http://HOST:PORT, https://HOST:PORT or unix:@NAME",
            ) from None
    return urls


def process_mark(pid: int) -> str:
    """Return a name for a running process: its pid and, where /proc reports it, its start time."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name of the process, in parentheses, may contain anything. After it come the state (the
            # first field) and, as the 20th, the start time.
            return f"{pid}:{file.read().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return f"{pid}:"


def is_left_behind(context: Mapping[str, Any]) -> bool:
    """Return whether a context belongs to a `laminar dev` that ended without removing it (``kill -9``)."""
    mark = context.get("process")
    if not isinstance(mark, str) or not mark.partition(":")[0].isdecimal():
        return False
    return os.path.isdir("/proc/self") and process_mark(int(mark.partition(":")[0])) != mark


def _with_scheme(url: str) -> str:
    """Return `url` with ``http://`` before a plain ``HOST:PORT``."""
    host, colon, port = url.rpartition(":")
    short = colon and host and "/" not in url and port.isdecimal() and not host.startswith("unix")
    return f"http://{url}" if short else url


def _current_context(path: Path) -> Mapping[str, Any] | None:
    """Return the context that ``current`` names, None if there is no file or it names none."""
    import tomllib

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path}: {fault}", code="bad_context_file") from None
    current = content.get("current")
    if current is None:
        return None
    context = (content.get("contexts") or {}).get(current)
    if isinstance(context, dict) and is_left_behind(context):
        return None
    if not isinstance(context, dict):
        raise ConfigError(
            f"{path}: the current context {current!r} is not there",
            code="no_context",
            hint="`laminar context list` shows what is",
        )
    return context
