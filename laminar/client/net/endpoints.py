"""The nodes that `connect` begins with: its argument, else the environment, else the command line's context.

The context file is only read here; ``laminar context`` writes it. Its form is::

    current = "dev"
    [contexts.dev]
    urls = ["https://127.0.0.1:7070"]
    token = "..."  # optional, or token_file = "/path"
    ca = "/path"  # optional
    certificate = "/path"  # optional, and its key = "/path" unless that is in the same file
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.client.errors import ConfigError
from laminar.client.net.token_file import check_token, read_token
from laminar.http.protocol.answer import Target

if TYPE_CHECKING:
    from laminar.http.client.tls import Trust

DEFAULT_URL = "http://127.0.0.1:7070"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The URLs of the nodes that a client asks first, its token, and its files for TLS.

    `origin` says where the URLs were found. With a `token_file`, `token` is used while the file cannot be
    read. `ca` is the path of a PEM file, or its text: nodes must have certificates of this CA (None: of one
    that the system trusts). `certificate` and `key` are paths of PEM files: the client's own certificate.
    """

    urls: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    origin: str = "argument"
    token_file: str | None = None
    ca: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = None

    @property
    def tls_only(self) -> bool:
        """Whether all URLs are https: then nothing is sent without TLS, wherever an answer leads."""
        return all(Target.of(url).tls for url in self.urls)

    def may_hear_token(self, url: str) -> bool:
        """Return whether the token may be sent to `url`.

        It may be sent to hosts that `urls` name, at any port, but never without TLS if `urls` has https. With
        a `ca`, and only https in `urls`, it may also be sent to other hosts over TLS: nodes that proved to be
        the cluster's have named them, and they need certificates of its CA too.
        """
        asked = Target.of(url)
        if any(
            (named.host, named.path) == (asked.host, asked.path) and (asked.tls or not named.tls)
            for named in map(Target.of, self.urls)
        ):
            return True
        return asked.tls and self.ca is not None and self.tls_only

    def with_contents(self) -> Endpoints:
        """Return these endpoints with the contents of the token and CA files, for other machines.

        If the other machine has the token file, too, the file is used there. A certificate and its key must
        exist there: they are used as files only.

        Raises:
            ConfigError: a file cannot be read, or contains no token or no CA.
        """
        found = self
        if self.token_file is not None:
            found = replace(found, token=read_token(self.token_file)[0])
        if self.ca is not None:
            found = replace(found, ca=trust_in(self.ca).text)
        return found


def trust_in(ca: str | None, certificate: str | None = None, key: str | None = None) -> Trust:
    """Return the TLS settings of a client: the CAs of `ca` (None: the system's) and its own certificate.

    Raises:
        ConfigError: `ca` has no CA, or the certificate cannot be used with the key.
    """
    from laminar.http.client.tls import Trust, is_pem

    try:
        found = Trust(ca)
    except ValueError as fault:
        value = None if ca is None or is_pem(ca) else ca
        raise ConfigError(f"ca: {fault}", code="bad_ca", field="ca", value=value) from None
    if certificate is None:
        return found
    try:
        return Trust(ca, certificate=certificate, key=key)
    except ValueError as fault:
        raise ConfigError(
            str(fault), code="bad_certificate", field="certificate", value=certificate
        ) from None


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
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Endpoints:
    """Return the endpoints for the arguments of `connect`.

    The URLs are those of `url`, else of ``LAMINAR_URL``, else of the current context, else localhost.

    Several URLs in one string are separated by commas. If `url` is given, the token is `token` or that in
    `token_file`. ``LAMINAR_TOKEN`` or ``LAMINAR_TOKEN_FILE`` is then used only for hosts of ``LAMINAR_URL``:
    otherwise an untrusted URL could obtain the token of another cluster. ``LAMINAR_CA`` is used for every URL
    if no `ca` is given, and so are ``LAMINAR_CERTIFICATE`` and ``LAMINAR_KEY``: by a certificate a server
    learns no secret.

    Raises:
        ConfigError: a URL is malformed, or none is given; a token is malformed; or a key is given without its
            certificate.
    """
    given = os.environ if environment is None else environment
    if token is not None and token_file is not None:
        raise ConfigError("give a token or a token_file, not both", code="two_tokens", field="token_file")
    if token is not None:
        check_token(token, "token")
    file = None if token_file is None else os.fspath(token_file)
    ca = given.get("LAMINAR_CA") or None if ca is None else os.fspath(ca)
    shown = _pair(certificate, key) or _pair(given.get("LAMINAR_CERTIFICATE"), given.get("LAMINAR_KEY"))
    if url is not None:
        found = Endpoints(_urls(url, "url"), token, "argument", file, ca, *shown)
        if token is None and file is None and given.get("LAMINAR_URL"):
            own = Endpoints(_urls(given["LAMINAR_URL"], "LAMINAR_URL"))
            if all(map(own.may_hear_token, found.urls)):
                own_token, own_file = _token_of(given)
                return replace(found, token=own_token, token_file=own_file)
        return found
    if token is None and file is None:
        token, file = _token_of(given)
    if given.get("LAMINAR_URL"):
        urls = _urls(given["LAMINAR_URL"], "LAMINAR_URL")
        return Endpoints(urls, token, "LAMINAR_URL", file, ca, *shown)
    path = context_file(given)
    context = _current_context(path)
    if context is None:
        return Endpoints((DEFAULT_URL,), token, "default", file, ca, *shown)
    if token is None and file is None:
        token, file = (str(context[name]) if context.get(name) else None for name in ("token", "token_file"))
        if token is not None:
            check_token(token, str(path))
    if ca is None and context.get("ca"):
        ca = str(context["ca"])
    if not shown:
        shown = _pair(*(str(context[name]) if context.get(name) else None for name in ("certificate", "key")))
    urls = _urls(context.get("urls") or context.get("url") or "", str(path))
    return Endpoints(urls, token, str(path), None if token is not None else file, ca, *shown)


def _pair(
    certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
) -> tuple[str, str | None] | tuple[()]:
    """Return the paths of a certificate and its key; key None: the same file; () without a certificate.

    Raises:
        ConfigError: there is a key alone.
    """
    if certificate is None or not os.fspath(certificate):
        if key is not None and os.fspath(key):
            raise ConfigError(
                "the key of a certificate is given without the certificate",
                code="no_certificate",
                field="key",
                value=os.fspath(key),
            )
        return ()
    return os.fspath(certificate), os.fspath(key) if key is not None and os.fspath(key) else None


def _token_of(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the environment's token, or else its token file. Raises ConfigError for a malformed token."""
    token = environment.get("LAMINAR_TOKEN")
    if token:
        check_token(token, "LAMINAR_TOKEN")
        return token, None
    return None, environment.get("LAMINAR_TOKEN_FILE") or None


def _urls(given: str | Sequence[str], origin: str) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    found = [url for text in texts for url in str(text).split(",")]
    urls = tuple(_with_scheme(url.strip().rstrip("/")) for url in found if url.strip())
    if not urls:
        raise ConfigError(f"{origin} names no node", code="no_url", field=origin)
    for url in urls:
        try:
            Target.of(url)
        except ValueError as fault:
            raise ConfigError(
                f"{url!r} is not the URL of a node: {fault}",
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
    """Return the current context of the context file; None without such a file or a current context."""
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
            f"{path}: the current context {current!r} does not exist",
            code="no_context",
            hint="`laminar context list` shows what is",
        )
    return context
