"""Certificates for tests: of a CA of their own, also such as a node must refuse."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from laminar.node.host.certificates import NODE_URI, TlsFiles

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """The files of one certificate and its key."""

    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """The TLS of a server that shows this certificate, and asks for none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


class Authority:
    """A CA with its files in `folder`."""

    def __init__(self, folder: Path, *, days: int = 365) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.pem = folder / "ca.pem"
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._name, self._key.public_key(), days=days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def node(
        self, name: str, *hosts: str, file: str = "", days: int = 10, names: tuple[str, ...] | None = None
    ) -> Pair:
        """A node's certificate; `names` are the nodes it names, if not `name`. Negative `days`: expired."""
        alternatives: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(NODE_URI + each) for each in (names or (name,))
        ]
        alternatives += [
            x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
            for host in (hosts or ("127.0.0.1", "localhost"))
        ]
        return self._issue(name, alternatives, file=file, days=days)

    def client(self, name: str, *, days: int = 10) -> Pair:
        """A client's certificate, with the subject CN=`name`."""
        return self._issue(name, [], file="", days=days, uses=[ExtendedKeyUsageOID.CLIENT_AUTH])

    def files(self, pair: Pair) -> TlsFiles:
        """What a node with this certificate is given."""
        return TlsFiles(str(pair.certificate), str(pair.key), str(self.pem))

    def settings(self, pair: Pair) -> dict[str, str]:
        """The same as settings of a node."""
        return {
            "tls_certificate": str(pair.certificate),
            "tls_key": str(pair.key),
            "tls_ca": str(self.pem),
        }

    def context(self, pair: Pair | None = None, *, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        """What a client trusts with, and shows; of one version of TLS, if it is given."""
        context = ssl.create_default_context(cafile=str(self.pem))
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        if version is not None:
            context.minimum_version = context.maximum_version = version
        return context

    def _issue(
        self,
        name: str,
        alternatives: list[x509.GeneralName],
        *,
        file: str,
        days: int,
        uses: list[x509.ObjectIdentifier] | None = None,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), days=days)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        pair = Pair(self.folder / f"{file or name}.pem", self.folder / f"{file or name}.key")
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        # Each replaces its predecessor at once, as those who rotate certificates do.
        for path, content in (
            (pair.key, secret),
            (pair.certificate, _pem(builder.sign(self._key, hashes.SHA256()))),
        ):
            new = path.with_suffix(path.suffix + ".new")
            new.write_bytes(content)
            new.replace(path)
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * _DAY)
            .not_valid_after(now + days * _DAY)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
