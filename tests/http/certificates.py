"""CAs and certificates for tests, made by the command `openssl`."""

from __future__ import annotations

import ipaddress
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    file: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS settings of a server that shows this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file, self.key)
        return context


@dataclass(frozen=True)
class Authority:
    """A CA, whose certificate is the PEM file `ca`."""

    folder: Path
    name: str = "ca"

    @property
    def ca(self) -> Path:
        return self.folder / f"{self.name}.pem"

    @property
    def key(self) -> Path:
        return self.folder / f"{self.name}.key"

    @classmethod
    def make(cls, folder: Path, name: str = "ca") -> Authority:
        made = cls(folder, name)
        _openssl(
            *("req", "-x509", *_KEY, "-keyout", made.key, "-out", made.ca, "-days", "2"),
            *("-subj", f"/CN=test {name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
        return made

    def issue(
        self,
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        *,
        name: str = "node",
        expired: bool = False,
        usage: str = "serverAuth",
    ) -> Certificate:
        """Return a certificate for `hosts`, which are names or addresses."""
        made = Certificate(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, config = self.folder / f"{name}.csr", self.folder / f"{name}.cnf"
        index = self.folder / f"{name}.index"
        index.write_text("")
        config.write_text(
            "[ca]\ndefault_ca = ca\n"
            f"[ca]\ndatabase = {index}\nnew_certs_dir = {self.folder}\ndefault_md = sha256\n"
            "rand_serial = yes\npolicy = any\nunique_subject = no\n"
            "[any]\ncommonName = supplied\n"
            "[leaf]\nbasicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\n"
            f"extendedKeyUsage = {usage}\nauthorityKeyIdentifier = keyid\nsubjectKeyIdentifier = hash\n"
            + (f"subjectAltName = {','.join(map(_san, hosts))}\n" if hosts else "")
        )
        _openssl("req", "-new", *_KEY, "-keyout", made.key, "-out", request, "-subj", f"/CN={name}")
        period = ("20200101000000Z", "20200102000000Z") if expired else ("20200101000000Z", "21000101000000Z")
        _openssl(
            *("ca", "-batch", "-notext", "-config", config, "-extensions", "leaf", "-in", request),
            *("-out", made.file, "-cert", self.ca, "-keyfile", self.key),
            *("-startdate", period[0], "-enddate", period[1]),
        )
        return made


def _san(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return f"DNS:{host}"
    return f"IP:{host}"


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
