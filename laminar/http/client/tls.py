"""Which servers a client trusts, and why it did not trust one.

A `Trust` makes the TLS settings of connections from the CAs of a file, or from those of the system. Each
server's certificate is verified, and that it is for the host that is asked: this cannot be switched off.
"""

from __future__ import annotations

import os
import ssl
from typing import Final

from laminar.http.protocol.answer import Target, TlsFailed

PEM_MARK: Final = "-----BEGIN "
# Codes of OpenSSL's verification, and what a person can do.
_EXPIRED: Final = frozenset({9, 10})
_UNKNOWN_CA: Final = frozenset({2, 18, 19, 20, 21})
_OTHER_HOST: Final = frozenset({62, 64})


class Trust:
    """The CAs whose certificates are accepted: those of `ca`, else the system's.

    `ca` is the path of a PEM file, or the text of one. A file that changes is read again for the next
    connection; while it cannot be read, the CAs read last are used.

    Raises:
        ValueError: when made with a file or text that has no certificate.
    """

    def __init__(self, ca: str | None = None) -> None:
        self._ca = ca
        self._context: ssl.SSLContext | None = None
        self._read: tuple[int, int, int] | None = None
        if ca is not None:
            self._read = self._identity()
            self._context = self._made()

    @property
    def name(self) -> str:
        """The CAs in words, for errors."""
        if self._ca is None:
            return "the system's CAs"
        return "the given CA" if PEM_MARK in self._ca else self._ca

    def context(self) -> ssl.SSLContext:
        """Return the TLS settings for a new connection."""
        if self._context is None:
            self._context = self._made()  # the system's CAs take a while to load, so only if they are needed
        elif self._ca is not None and (identity := self._identity()) not in (None, self._read):
            try:
                self._context = self._made()
            except ValueError:
                return self._context  # perhaps it is being written
            self._read = identity
        return self._context

    def refused(self, url: str, fault: ssl.SSLError) -> TlsFailed | None:
        """Return the failure of a handshake with `url`; None if the connection was only lost in it."""
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

    def _identity(self) -> tuple[int, int, int] | None:
        """Return what changes when the file does; None for a text, or if there is no file now."""
        if self._ca is None or PEM_MARK in self._ca:
            return None
        try:
            found = os.stat(self._ca)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _made(self) -> ssl.SSLContext:
        given = self._ca
        try:
            if given is None:
                context = ssl.create_default_context()
            elif PEM_MARK in given:
                context = ssl.create_default_context(cadata=given)
            else:
                context = ssl.create_default_context(cafile=given)
        except ssl.SSLError:
            raise ValueError(f"{self.name} has no certificates in PEM") from None
        except OSError as fault:
            raise ValueError(f"{self.name}: {fault.strerror or fault}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


SYSTEM: Final = Trust()
