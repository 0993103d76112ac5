"""`laminar cert`: what it makes is what nodes and clients take."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path
from typing import Any

import pytest

from laminar.node.access.certificates import subject_of
from laminar.node.host.certificates import CertificateError, Certificates, TlsFiles
from tests.cli.conftest import Command as Laminar


def made(laminar: Laminar, folder: Path, *words: str) -> int:
    return laminar("cert", *words, "--directory", str(folder)).code


def files(folder: Path, name: str) -> TlsFiles:
    return TlsFiles(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem"))


def test_a_node_takes_its_certificate(laminar: Laminar, tmp_path: Path) -> None:
    """It names the node and its hosts, and only its owner reads the key."""
    assert 0 == made(laminar, tmp_path, "ca")
    assert 0 == made(laminar, tmp_path, "node", "n1", "--host", "10.0.0.1", "--host", "n1.example.net")

    certificates = Certificates(files(tmp_path, "n1"), node="n1")

    assert frozenset({"n1"}) == certificates.current.names
    for name in ("ca", "n1"):
        assert 0o600 == stat.S_IMODE((tmp_path / f"{name}.key").stat().st_mode)
    shown = _shown(certificates.current.http, tmp_path, "n1.example.net")
    assert {("DNS", "n1.example.net"), ("IP Address", "10.0.0.1"), ("URI", "laminar:node:n1")} == set(
        shown["subjectAltName"]
    )


def test_a_client_shows_its_name_and_is_no_server(laminar: Laminar, tmp_path: Path) -> None:
    """Its subject is CN=NAME; no node may run with it."""
    made(laminar, tmp_path, "ca")
    made(laminar, tmp_path, "node", "n1", "--host", "localhost")
    assert 0 == made(laminar, tmp_path, "client", "billing")
    node = Certificates(files(tmp_path, "n1"))
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.load_cert_chain(tmp_path / "billing.pem", tmp_path / "billing.key")

    assert "CN=billing" == subject_of(_handshake(node.current.http, client, "localhost")[0])
    with pytest.raises(CertificateError, match="unsuitable certificate purpose"):
        Certificates(files(tmp_path, "billing"))


def test_files_are_replaced_on_demand_only(laminar: Laminar, tmp_path: Path) -> None:
    """A CA never: its key would be lost."""
    made(laminar, tmp_path, "ca")
    made(laminar, tmp_path, "node", "n1", "--host", "localhost")
    before = (tmp_path / "n1.pem").read_bytes()

    assert 1 == made(laminar, tmp_path, "ca")
    assert 1 == made(laminar, tmp_path, "node", "n1", "--host", "localhost")
    assert before == (tmp_path / "n1.pem").read_bytes()
    assert 0 == made(laminar, tmp_path, "node", "n1", "--host", "localhost", "--replace")
    assert before != (tmp_path / "n1.pem").read_bytes()
    Certificates(files(tmp_path, "n1"), node="n1")


def test_two_cas_of_one_name_are_told_apart(laminar: Laminar, tmp_path: Path) -> None:
    """While a CA is exchanged for its successor, nodes trust both."""
    for folder in (tmp_path / "old", tmp_path / "new"):
        made(laminar, folder, "ca")
        made(laminar, folder, "node", "n1", "--host", "localhost")
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join((tmp_path / each / "ca.pem").read_bytes() for each in ("old", "new")))

    for folder in (tmp_path / "old", tmp_path / "new"):
        Certificates(TlsFiles(str(folder / "n1.pem"), str(folder / "n1.key"), str(both)), node="n1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("node", "n1"), "give each host"),
        (("node", "a/b", "--host", "h"), "node must be 1 to 63 letters"),
        (("node", "ca", "--host", "h"), "the CA's own files"),
        (("client", "a/b"), "none of them '/'"),
        (("client", "x", "--days", "0"), "--days must be between 1 and"),
    ],
)
def test_what_cannot_be_is_refused(
    laminar: Laminar, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """With the field and its limit; nothing is written."""
    made(laminar, tmp_path, "ca")

    answer = laminar("cert", *words, "--directory", str(tmp_path))

    assert 2 == answer.code
    assert said in answer.err
    assert {"ca.key", "ca.pem"} == {path.name for path in tmp_path.iterdir()}


def test_without_a_ca_the_way_to_one_is_named(laminar: Laminar, tmp_path: Path) -> None:
    """The file that is missing, and the command that makes it."""
    answer = laminar("cert", "client", "x", "--directory", str(tmp_path))

    assert 1 == answer.code
    assert "ca.pem is not there: `laminar cert ca` makes it" in answer.err


def _shown(server: ssl.SSLContext, folder: Path, host: str) -> dict[str, Any]:
    client = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    return _handshake(server, client, host)[1]


def _handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each side saw of the other: the client's certificate, the server's."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname=host),
        server.wrap_bio(there, back, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)
    return ends[1].getpeercert() or {}, ends[0].getpeercert() or {}
