"""Certificates of a node: what is loaded, what is refused, and what happens when the files change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from laminar.node.host.certificates import (
    CertificateError,
    Certificates,
    TlsFiles,
    node_names,
)
from tests.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A CA."""
    return Authority(tmp_path / "ca")


def test_a_certificate_gives_the_nodes_name(authority: Authority) -> None:
    """A node without a name of its own takes it."""
    certificates = Certificates(authority.files(authority.node("n1")))

    assert "n1" == certificates.only_name
    certificates.name("n1")
    with pytest.raises(CertificateError, match="names n1, and this node is n2"):
        certificates.name("n2")


def test_what_others_would_refuse_is_refused_at_the_start(authority: Authority, tmp_path: Path) -> None:
    """Expired, of another CA, of no node, without its key: the text says which."""
    other = Authority(tmp_path / "other")
    good, stranger = authority.node("n1"), other.node("n1")
    files = authority.files(good)

    cases = [
        (authority.files(authority.node("old", days=-1)), "certificate has expired"),
        (authority.files(stranger), "unable to get local issuer certificate"),
        (authority.files(authority.client("billing")), "unsuitable certificate purpose"),
        (
            TlsFiles(files.certificate, str(stranger.key), files.ca),
            "cannot be used: the key is of another certificate$",
        ),
        (TlsFiles(files.certificate, files.key, str(tmp_path / "none")), "tls_ca .*none: No such file"),
        (TlsFiles(files.certificate, files.key, files.key), "tls_ca .* cannot be used"),
    ]
    for each, text in cases:
        with pytest.raises(CertificateError, match=f"(?i){text}"):
            Certificates(each)


def test_an_encrypted_key_is_refused_and_asks_for_no_password(authority: Authority, tmp_path: Path) -> None:
    """OpenSSL would read it from the terminal, which a service does not have."""
    from cryptography.hazmat.primitives import serialization

    pair = authority.node("n1")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )

    with pytest.raises(CertificateError, match="the key is encrypted"):
        Certificates(authority.files(pair))


def test_files_that_changed_are_loaded_and_those_that_did_not_are_not(authority: Authority) -> None:
    """By their time, size and inode."""
    certificates = Certificates(authority.files(authority.node("n1")))
    before = certificates.current

    assert not certificates.refresh()
    assert certificates.current is before
    authority.node("n1", days=30)
    assert certificates.refresh()
    assert certificates.current.expires_s > before.expires_s
    assert certificates.refresh(again=True)


def test_what_cannot_be_used_changes_nothing_until_it_can(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a pair, files that are gone, a certificate of another node: the contexts in use stay."""
    pair = authority.node("n1")
    certificates = Certificates(authority.files(pair), node="n1")
    before = certificates.current
    old = pair.certificate.read_bytes()

    with caplog.at_level(logging.ERROR):
        authority.node("n1")
        new = pair.certificate.read_bytes()
        pair.certificate.write_bytes(old)  # the key is newer than the certificate
        assert not certificates.refresh()
        assert not certificates.refresh()
        assert 1 == len(caplog.records)
        os.remove(pair.certificate)
        assert not certificates.refresh()
        authority.node("n2", file="n1")
        assert not certificates.refresh()
        assert certificates.current is before
        assert "names n2, and this node is n1" in caplog.records[-1].getMessage()

    authority.node("n1")
    pair.certificate.write_bytes(pair.certificate.read_bytes() or new)
    assert certificates.refresh()
    assert {"loaded": 2, "load_failures": 4} == {
        name: count for name, count in certificates.statistics().items() if not name.endswith("left_s")
    }


def test_a_certificate_that_ends_soon_is_reported(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, and as a number for a monitor."""
    certificates = Certificates(authority.files(authority.node("n1", days=3)))

    with caplog.at_level(logging.WARNING):
        certificates.refresh()
        certificates.refresh()

    assert 1 == len(caplog.records)
    assert "ends in 3.0 days" in caplog.text
    assert 2 * 86_400 < certificates.statistics()["certificate_left_s"] <= 3 * 86_400


def test_a_ca_that_ends_soon_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first of several that ends: who adds a new one still has to give everyone a certificate of it."""
    old, new = Authority(tmp_path / "old", days=20), Authority(tmp_path / "new", days=900)
    pair = old.node("n1", days=19)
    old.pem.write_text(old.pem.read_text() + new.pem.read_text())
    certificates = Certificates(old.files(pair))

    with caplog.at_level(logging.WARNING):
        certificates.refresh()
        certificates.refresh()

    assert [f"a CA of tls_ca {old.pem} ends in 20.0 days"] == caplog.messages
    assert 19 * 86_400 < certificates.statistics()["ca_left_s"] <= 20 * 86_400
    assert certificates.statistics()["certificate_left_s"] < certificates.statistics()["ca_left_s"]


def test_names_are_read_from_what_the_handshake_has_verified() -> None:
    """Only the URI names a node."""
    shown = {
        "subjectAltName": (("DNS", "laminar:node:n2"), ("URI", "laminar:node:n1"), ("URI", "other:n3")),
    }

    assert frozenset({"n1"}) == node_names(shown)
    assert frozenset() == node_names(None)
