"""The TLS settings of a client: the CAs that it trusts, its certificate, and the errors of handshakes.

A `Trust` makes the TLS settings of connections from the CAs of a file, or from those of the system. Each
server's certificate is verified, and must name the host of the URL: this cannot be switched off. The client's
own certificate is shown to each server that asks for one.
"""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Final

from laminar.http.protocol.answer import Target, TlsFailed

_CERTIFICATE: Final = re.compile("-----BEGIN CERTIFICATE-----[^-]*-----END CERTIFICATE-----")
# Codes of OpenSSL's verification, and what a person can do.
_EXPIRED: Final = frozenset({9, 10})
_UNKNOWN_CA: Final = frozenset({2, 18, 19, 20, 21})
_OTHER_HOST: Final = frozenset({62, 64})


def is_pem(text: str) -> bool:
    """Return whether `text` is PEM itself, and not the path of a file."""
    return "-----BEGIN " in text


class Trust:
    """The CAs whose certificates are accepted: those of `ca`, else the system's.

    `ca` is the path of a PEM file, or the text of one. `certificate` and `key` are paths of PEM files with
    the client's own certificate; without `key` the key is in the certificate's file. Files that change are
    read again for the next connection; while a file cannot be read, its last content is used.

    Raises:
        ValueError: a file or text has no certificate, or the key does not belong to the certificate.
    """

    def __init__(
        self, ca: str | None = None, *, certificate: str | None = None, key: str | None = None
    ) -> None:
        self._ca = ca
        self._certificate = certificate
        self._key = key
        self._files = [file for file in (ca, certificate, key) if file is not None and not is_pem(file)]
        self._context: ssl.SSLContext | None = None
        self._name = "the system's CAs"
        self._read: tuple[tuple[int, int, int], ...] | None = None
        self.text: str | None = None
        """The CAs as PEM, for another machine; None for the system's."""
        if ca is not None or certificate is not None:
            self._read = self._identity()
            self._context = self._made()

    @classmethod
    def of(cls, context: ssl.SSLContext, name: str) -> Trust:
        """Return a `Trust` that uses `context` for all connections; `name` describes its CAs in errors."""
        made = cls()
        made._context, made._name = context, name
        return made

    @property
    def name(self) -> str:
        """A description of the CAs, for errors: a path, or words."""
        if self._ca is None:
            return self._name
        return "the given CA" if is_pem(self._ca) else self._ca

    def context(self) -> ssl.SSLContext:
        """Return the TLS settings for a new connection."""
        if self._context is None:
            self._context = self._made()  # the system's CAs take a while to load, so only if they are needed
        elif self._files and (identity := self._identity()) not in (None, self._read):
            try:
                self._context = self._made()
            except ValueError:
                return self._context  # perhaps it is being written
            self._read = identity
        return self._context

    def refused(self, url: str, fault: ssl.SSLError) -> TlsFailed | None:
        """Return the error to raise for a failed handshake with `url`, with advice on what to do.

        None if the connection was only lost during the handshake, so that it may be tried again.
        """
        host = Target.of(url).host
        if isinstance(fault, ssl.SSLCertVerificationError):
            said, hint = fault.verify_message.rstrip("."), None
            if fault.verify_code in _EXPIRED:
                hint = f"renew the certificate of {host}; if it is new, compare the clocks"
            elif fault.verify_code in _OTHER_HOST:
                hint = "connect by a name that the certificate has, or make one for this name too"
            elif fault.verify_code in _UNKNOWN_CA:
                hint = "name the file of the cluster's CA: ca=, LAMINAR_CA, --ca"
            return TlsFailed(
                f"{url}: the certificate of {host} is not accepted: {said} (verified with {self.name})",
                hint=hint,
            )
        if isinstance(fault, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return None
        if fault.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return TlsFailed(
                f"{url}: {host} answers without TLS there", hint="is it http:// or another port?"
            )
        return TlsFailed(f"{url}: TLS failed: {fault.reason or fault}")

    def _identity(self) -> tuple[tuple[int, int, int], ...] | None:
        """Return values that change when a file changes; None without files, or if a file is missing now."""
        try:
            found = [os.stat(file) for file in self._files]
        except OSError:
            return None
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found) or None

    def _made(self) -> ssl.SSLContext:
        if self._ca is None:
            context = ssl.create_default_context()
        else:
            text = self._pem()
            try:
                context = ssl.create_default_context(cadata=text)
            except ssl.SSLError as fault:
                raise ValueError(
                    f"{self.name} has a certificate that cannot be read: {fault.reason}"
                ) from None
            self.text = text
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._certificate is not None:
            try:
                context.load_cert_chain(self._certificate, self._key, password=_no_password)
            except (OSError, ValueError) as fault:  # `ssl.SSLError` is an `OSError`
                files = self._certificate if self._key is None else f"{self._certificate} with {self._key}"
                why = fault.reason if isinstance(fault, ssl.SSLError) else getattr(fault, "strerror", None)
                raise ValueError(f"the certificate {files} cannot be used: {why or fault}") from None
        return context

    def _pem(self) -> str:
        """Return the certificates of the text or the file, without the text between them."""
        assert self._ca is not None
        try:
            text = self._ca if is_pem(self._ca) else Path(self._ca).read_text("utf-8", errors="replace")
        except OSError as fault:
            raise ValueError(f"{self.name}: {fault.strerror or fault}") from None
        found = _CERTIFICATE.findall(text)
        if not found:
            raise ValueError(f"{self.name} has no certificates in PEM")
        return "\n".join(found) + "\n"


def _no_password() -> str:
    """Refuse an encrypted key; OpenSSL would ask for its password on the terminal."""
    raise ValueError("the key is encrypted")


SYSTEM: Final = Trust()
