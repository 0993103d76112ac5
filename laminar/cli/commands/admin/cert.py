"""`laminar cert`: a CA for one cluster, and the certificates of its nodes and clients.

It needs the extra `tls` (the library `cryptography`); nodes and clients need only the files. A CA that an
organisation has already serves as well: docs/operating.md says what a certificate must name.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_DAYS = 3650
DAYS = 365
MOST_DAYS = 36_500
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
# Clocks that are this much behind accept a new certificate at once.
_EARLIER = datetime.timedelta(minutes=5)

Folder = Annotated[Path, Parameter(help="Where the files of the CA are, and the new ones are written.")]
Days = Annotated[int, Parameter(help="How long it is valid, in days.")]
Replace = Annotated[bool, Parameter(negative="", help="Write over files of an earlier certificate.")]


def ca(
    *,
    directory: Folder = Path(),
    name: Annotated[str, Parameter(help="The name of the CA, for people.")] = "Laminar CA",
    days: Days = CA_DAYS,
) -> None:
    """Make a CA: `ca.pem`, which every node and client needs, and `ca.key`, which stays secret."""
    _need_cryptography()
    from cryptography import x509

    key, subject = _new_key(), _name(_checked(name))
    builder = _builder(subject, subject, key, _checked_days(days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    _write(directory, "ca", _signed(builder, key), key, replace=False)


def node(
    name: Annotated[str, Parameter(help="The node's name (setting `node`).")],
    *,
    host: Annotated[
        tuple[str, ...],
        Parameter(help="A host by which clients and nodes reach it, a name or an IP address; repeatable."),
    ] = (),
    directory: Folder = Path(),
    days: Days = DAYS,
    replace: Replace = False,
) -> None:
    """Make the certificate of a node: `NAME.pem` and `NAME.key`."""
    _need_cryptography()
    from cryptography import x509

    from laminar.node.host.certificates import NODE_URI
    from laminar.node.host.settings import SettingsError
    from laminar.node.host.settings_sources import convert

    if not host:
        raise UsageError("give each host by which it is reached: laminar cert node NAME --host 10.0.0.1")
    try:
        convert("node", name, origin="NAME")
    except SettingsError as error:
        raise UsageError(str(error)) from None
    alternatives = [x509.UniformResourceIdentifier(NODE_URI + name), *map(_host, host)]
    _issue(
        name,
        directory,
        days=days,
        replace=replace,
        alternatives=alternatives,
        server=True,
    )


def client(
    name: Annotated[str, Parameter(help="The client's name: its subject is CN=NAME.")],
    *,
    directory: Folder = Path(),
    days: Days = DAYS,
    replace: Replace = False,
) -> None:
    """Make the certificate of a client: `NAME.pem` and `NAME.key`."""
    _need_cryptography()
    _issue(_checked(name), directory, days=days, replace=replace, alternatives=[], server=False)


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401  # the library is optional: it is asked for before it is used
    except ImportError:
        raise Failed("this needs the library cryptography: pip install 'laminar-mq[tls]'") from None


def _issue(
    name: str,
    directory: Path,
    *,
    days: int,
    replace: bool,
    alternatives: list[x509.GeneralName],
    server: bool,
) -> None:
    """Write a certificate of the CA in `directory`; only that of a `server` may accept connections."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if name == "ca":
        raise UsageError("NAME is the name of the CA's own files: choose another")
    authority, authority_key = _read_ca(directory)
    key = _new_key()
    builder = _builder(_name(name), authority.subject, key, _days_within(authority, _checked_days(days)))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if server else [])]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    _write(directory, name, _signed(builder, authority_key), key, replace=replace)


def _host(text: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    # A URL, or a host with its port, would be a name that no client ever asks for.
    if not _HOST.fullmatch(text):
        raise UsageError(f"--host is a name or an IP address, without a port (it is {text!r})")
    return x509.DNSName(text)


def _checked(name: str) -> str:
    if not 1 <= len(name) <= 64 or "/" in name or not name.isprintable() or name.startswith("."):
        raise UsageError(f"NAME has 1 to 64 printable characters, none of them '/' (it is {name!r})")
    return name


def _checked_days(days: int) -> int:
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"--days must be between 1 and {MOST_DAYS} (it is {days})")
    return days


def _days_within(authority: x509.Certificate, days: int) -> int:
    """Return `days`; refuse more than the CA is still valid for, because no node warns before that."""
    end = authority.not_valid_after_utc
    left = (end - datetime.datetime.now(datetime.UTC)).days
    if days > left:
        raise UsageError(
            f"--days: the CA ends before, on {end:%Y-%m-%d}: at most {max(left, 0)} (it is {days})"
        )
    return days


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: x509.CertificateBuilder, authority_key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return builder.add_extension(issuer, critical=False).sign(authority_key, hashes.SHA256())


def _read_ca(directory: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        key: Any = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
    except FileNotFoundError as error:
        raise Failed(f"{error.filename} is not there: `laminar cert ca` makes it") from None
    except ValueError as error:
        raise Failed(f"the CA in {directory} can't be read: {error}") from None
    if key.public_key() != certificate.public_key():
        raise Failed(f"{directory / 'ca.key'} is not the key of {directory / 'ca.pem'}")
    return certificate, key


def _write(
    directory: Path, name: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey, *, replace: bool
) -> None:
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {directory / f"{name}.key": (secret, 0o600)}
    files[directory / f"{name}.pem"] = (certificate.public_bytes(pem), 0o644)
    there = [str(path) for path in files if path.exists()]
    if there and not replace:
        hint = "choose another --directory" if name == "ca" else "--replace writes over it"
        raise Failed(f"{there[0]} is there already: {hint}")
    directory.mkdir(parents=True, exist_ok=True)
    for path, (content, mode) in files.items():
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        new.replace(path)
        print(path)
