"""The certificate of a node and the CAs that it trusts: PEM files, loaded into TLS contexts.

`Certificates` is made by the supervisor before the first fork, so each process has the last good contexts in
memory, and each looks for newer files by itself. Files that cannot be used are reported and change nothing:
the contexts made before stay in use. Open connections keep the certificates that they began with.

A node's certificate names the node by a URI among its alternative names, `laminar:node:NAME`. The names of
hosts in it are for clients, which compare them with the URL that they were given.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("laminar.tls")

NODE_URI = "laminar:node:"
CHECK_S = 5.0
"""How often a process looks whether the files have changed."""
WARN_S = 14 * 86_400
"""How long before its end a certificate is reported."""
CA_WARN_S = 60 * 86_400
"""The same of a CA: all nodes and clients need another one, and certificates of it."""

# What OpenSSL names in a way that says little.
_REASONS = {
    "HTTP_REQUEST": "the other side speaks http://, not https://",
    "KEY_VALUES_MISMATCH": "the key is of another certificate",
    "PEM_LIB": "a file has not what it should in PEM",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it has no certificates in PEM",
}


class CertificateError(Exception):
    """The files of certificates cannot be used; the text names the file or the fault."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: a chain that begins with the node's certificate, its key, and CAs."""

    certificate: str
    key: str
    ca: str

    def setting(self, path: str) -> str:
        """Return the setting that names this file."""
        named = {self.key: "tls_key", self.ca: "tls_ca", self.certificate: "tls_certificate"}
        return named[path]

    def signature(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when one of the files is replaced or written.

        Raises:
            OSError: one of the files does not exist.
        """
        stats = [os.stat(path) for path in (self.certificate, self.key, self.ca)]
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats)


@dataclass(frozen=True, slots=True)
class Contexts:
    """The TLS contexts made from the certificate files.

    `http` asks clients for a certificate and accepts those without one. `accept` and `connect` are for
    connections of nodes, where both sides show one. `join` is for a node that asks another by HTTP.
    """

    http: ssl.SSLContext
    accept: ssl.SSLContext
    connect: ssl.SSLContext
    join: ssl.SSLContext
    names: frozenset[str]
    """The nodes that the own certificate names."""
    expires_s: float
    """When the own certificate ends, in seconds since 1970."""
    ca_expires_s: float
    """When the first of the CAs ends."""


def node_names(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of the nodes in a verified certificate (a result of `getpeercert`); none for None."""
    alternatives = (certificate or {}).get("subjectAltName", ())
    return frozenset(
        value.removeprefix(NODE_URI)
        for kind, value in alternatives
        if kind == "URI" and value.startswith(NODE_URI)
    )


def load(files: TlsFiles) -> Contexts:
    """Return the contexts of these files. Blocks.

    The own certificate is verified as other nodes will: in both roles, by the given CAs.

    Raises:
        CertificateError: a file is missing or unreadable, or others would refuse the certificate.
    """
    http, accept = _server(files), _server(files)
    http.verify_mode = ssl.CERT_OPTIONAL
    accept.verify_mode = ssl.CERT_REQUIRED
    connect = _client(files)
    connect.check_hostname = False  # the handshake of nodes compares the node's name
    # Both ends are ours. In 1.3 certificates are encrypted, too, and nothing of a session is used again.
    accept.minimum_version = connect.minimum_version = ssl.TLSVersion.TLSv1_3
    own = _verified_by_itself(files, accept, connect)
    return Contexts(
        http=http,
        accept=accept,
        connect=connect,
        join=_client(files),
        names=node_names(own),
        expires_s=ssl.cert_time_to_seconds(own["notAfter"]),
        ca_expires_s=_first_end(connect, own),
    )


def _first_end(context: ssl.SSLContext, own: Mapping[str, Any]) -> float:
    """Return when the CA that expires first does so, in seconds since 1970."""
    ends = [str(each["notAfter"]) for each in context.get_ca_certs()]
    # Where the own certificate stands for its CA, OpenSSL counts none.
    return min(map(ssl.cert_time_to_seconds, ends or [str(own["notAfter"])]))


def _server(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Clients can ask for a new key only by a new connection, which is bounded as such. No ticket lets one
    # leave out the certificates. TLS 1.2 can also go on with a session by its id: this process has verified
    # its certificate at most two hours ago, and by these files.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    return _filled(context, files)


def _client(files: TlsFiles) -> ssl.SSLContext:
    return _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)


def _filled(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:  # `ssl.SSLError` is an `OSError`
        reason = reason_of(error)
        text = f"tls_certificate {files.certificate} and tls_key {files.key} cannot be used: {reason}"
        raise CertificateError(text) from error
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        raise CertificateError(f"tls_ca {files.ca} cannot be used: {reason_of(error)}") from error
    return context


def _no_password() -> str:
    """Refuse an encrypted key; OpenSSL would ask for its password on the terminal."""
    raise ValueError("the key is encrypted")


def _verified_by_itself(
    files: TlsFiles, accept: ssl.SSLContext, connect: ssl.SSLContext
) -> Mapping[str, Any]:
    """Return the own certificate, after a handshake in memory in which each side verified it."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = accept.wrap_bio(there, back, server_side=True)
    client = connect.wrap_bio(back, there)
    waiting = [client, server]
    try:
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)
    except ssl.SSLError as error:
        text = f"tls_certificate {files.certificate} would be refused by other nodes: {reason_of(error)}"
        raise CertificateError(text) from error
    own = server.getpeercert()
    assert own, "a handshake that demands a certificate ended without one"
    return own


def reason_of(error: BaseException) -> str:
    """Return the fault of a handshake in words, without OpenSSL's numbers."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return _REASONS.get(error.reason) or error.reason.lower().replace("_", " ")
    if isinstance(error, ConnectionResetError):
        return "the other side left within the handshake"
    return str(error) or type(error).__name__


def is_of_certificate(error: BaseException) -> bool:
    """Return whether a handshake failed because of a certificate: missing, of another CA, expired."""
    reason = getattr(error, "reason", None) or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in reason


class Certificates:
    """The certificates of one process: its TLS contexts, which are loaded again when the files change.

    `node` is the name that the certificate must have; None: not known yet.
    """

    def __init__(self, files: TlsFiles, *, node: str | None = None) -> None:
        """Load the files.

        Raises:
            CertificateError: they cannot be used.
        """
        self.files = files
        self.node = node
        self.loaded = 0
        self.failed = 0
        self._loaded_from: object = None
        self._failed_from: object = None
        # By what ends: when that was last reported.
        self._warned_s: dict[str, float] = {}
        self.current = self._load()

    def name(self, node: str) -> None:
        """Set the node's name, which the certificate must contain.

        Raises:
            CertificateError: the certificate does not name this node.
        """
        self._check_name(self.current, node)
        self.node = node

    @property
    def only_name(self) -> str:
        """The name of the node in the certificate, if it names exactly one; else empty."""
        return next(iter(self.current.names)) if len(self.current.names) == 1 else ""

    def refresh(self, *, again: bool = False) -> bool:
        """Load the files if they have changed or `again` is set. Blocks; may run in a thread.

        Return whether new contexts are in use. Files that cannot be used are logged once, and tried again at
        each call.
        """
        try:
            found: object = self.files.signature()
        except OSError as error:
            found = str(error)
        if found == self._loaded_from and not again:
            self._warn_if_it_ends()
            return False
        try:
            self.current = self._load()
        except CertificateError as error:
            self.failed += 1
            if found != self._failed_from or again:
                log.error("the new certificates cannot be used, and those in use are kept: %s", error)
            self._failed_from = found
            return False
        self._failed_from = None
        log.info("certificates loaded from %s", self.files.certificate)
        self._warn_if_it_ends()
        return True

    def statistics(self) -> dict[str, int]:
        """Return counters, and the seconds until the own certificate and the first CA expire."""
        now_s = time.time()
        return {
            "loaded": self.loaded,
            "load_failures": self.failed,
            "certificate_left_s": int(self.current.expires_s - now_s),
            "ca_left_s": int(self.current.ca_expires_s - now_s),
        }

    def _load(self) -> Contexts:
        try:
            # Taken before: files that change meanwhile are loaded again.
            signature = self.files.signature()
        except OSError as error:
            setting = self.files.setting(str(error.filename))
            raise CertificateError(f"{setting} {error.filename}: {error.strerror}") from error
        contexts = load(self.files)
        if self.node is not None:
            self._check_name(contexts, self.node)
        elif not contexts.names:
            raise CertificateError(
                f"tls_certificate {self.files.certificate} names no node: its alternative names must have "
                f"a URI {NODE_URI}NAME (laminar cert node NAME)"
            )
        self._loaded_from = signature
        self.loaded += 1
        return contexts

    def _check_name(self, contexts: Contexts, node: str) -> None:
        if node not in contexts.names:
            named = ", ".join(sorted(contexts.names)) or "no node"
            raise CertificateError(
                f"tls_certificate {self.files.certificate} names {named}, and this node is {node}: its "
                f"alternative names must have the URI {NODE_URI}{node} (laminar cert node {node})"
            )

    def _warn_if_it_ends(self) -> None:
        now_s = time.time()
        for what, expires_s, warn_s in (
            (f"tls_certificate {self.files.certificate}", self.current.expires_s, WARN_S),
            (f"a CA of tls_ca {self.files.ca}", self.current.ca_expires_s, CA_WARN_S),
        ):
            left_s = expires_s - now_s
            if left_s < warn_s and now_s - self._warned_s.get(what, 0.0) >= 86_400:
                self._warned_s[what] = now_s
                log.warning("%s ends in %.1f days", what, left_s / 86_400)
