"""HKDF by the vectors of RFC 5869, and the keys of one secret."""

from __future__ import annotations

from laminar.node.secret.keys import Keys, expand, extract


def test_the_vectors_of_rfc_5869() -> None:
    """Appendix A.1 to A.3: with salt and info, with long ones, and with none."""
    key = extract(bytes(range(13)), b"\x0b" * 22)
    assert "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5" == key.hex()
    assert (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
        == expand(key, bytes(range(0xF0, 0xFA)), 42).hex()
    )
    key = extract(bytes(range(0x60, 0xB0)), bytes(range(0x50)))
    assert "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244" == key.hex()
    assert expand(key, bytes(range(0xB0, 0x100)), 82).hex().startswith("b11e398dc80327a1c8e7f78c596a4934")
    key = extract(b"", b"\x0b" * 22)
    assert "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04" == key.hex()
    assert expand(key, b"", 42).hex().endswith("9d201395faa4b61a96c8")


def test_each_use_has_a_key_of_its_own() -> None:
    """Also each connection, direction and credential; and none is the secret."""
    keys, other = Keys(b"of sixteen letters"), Keys(b"of sixteen letterz")
    found = [
        *(
            keys.secret,
            keys.handshake,
            keys.gossip,
            keys.join,
            keys.datagrams_of("a"),
            keys.datagrams_of("b"),
        ),
        *(keys.frames_of(way, seen) for way in (b"initiator", b"acceptor") for seen in (b"1", b"2")),
        *(other.secret, other.handshake, other.gossip, other.join, other.datagrams_of("a")),
    ]
    assert len(set(found)) == len(found)
    assert keys.gossip == Keys(b"of sixteen letters").gossip
    assert "letters" not in repr(keys)
