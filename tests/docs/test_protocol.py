"""docs/protocol.md's tables of what nodes say to each other are those of the code."""

from __future__ import annotations

import re

import pytest

from laminar.node.api.records.datagrams import MOST_WAITING
from laminar.node.runtime.reuseport import HASH_POSITION
from laminar.node.transport.frame_check import MAC_BYTES, Checksum
from laminar.node.transport.handshake import Channel, Hello
from laminar.node.transport.link import HEADER, FrameKind
from laminar.wire import datagram
from membership.gossip.gossip import MAX_DATAGRAM_BYTES
from membership.sealing.bound import (
    CHALLENGE_MAGIC,
    HEAD_BYTES,
    ID_BYTES,
    MAGIC,
    MOST_SENDERS,
    MOST_SENT,
    WINDOW,
)
from membership.sealing.bound import MAC_BYTES as GOSSIP_MAC_BYTES
from raft import messages
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text()
MESSAGES = [kind for kind in vars(messages).values() if getattr(kind, "__struct_config__", None)]
COMMON = ("cluster", "group", "sender", "receiver", "incarnation", "term")


def test_the_frame_is_as_long_as_its_fields() -> None:
    """The payload begins where the table says; with a MAC it has more bytes before it."""
    assert f"| 12 | crc | u32, or {MAC_BYTES} bytes |" in PAGE
    assert f"| {HEADER.size + Checksum().size} | payload |" in PAGE and 12 == HEADER.size


@pytest.mark.parametrize("kind", FrameKind)
def test_every_kind_of_frame_is_listed(kind: FrameKind) -> None:
    assert f"| {kind.value} | `{kind.name}` |" in PAGE


@pytest.mark.parametrize("channel", Channel)
def test_every_channel_is_listed(channel: Channel) -> None:
    assert f"| {channel.value} `{channel.name}` |" in PAGE


def test_the_hello_has_these_members() -> None:
    """In this order, as it is an array."""
    assert f"`[{', '.join(Hello.__struct_fields__)}]`" in PAGE


@pytest.mark.parametrize(
    "kind",
    [kind for kind in MESSAGES if kind.__struct_config__.tag is not None],
    ids=lambda kind: kind.__name__,
)
def test_every_raft_message_is_listed_with_its_members(kind: type) -> None:
    """By its number on the wire, its members in their order."""
    config, fields = kind.__struct_config__, kind.__struct_fields__  # type: ignore[attr-defined]
    row = re.search(rf"\| {config.tag} \| `{kind.__name__}` \| (.*) \|", PAGE)

    assert row is not None
    assert COMMON == fields[: len(COMMON)]
    assert list(fields[len(COMMON) :]) == re.findall(r"`(\w+)`", row[1])


def test_nothing_else_is_listed_as_a_message() -> None:
    listed = re.findall(r"^\| \d+ \| `([A-Z][a-z]\w+)` \|", PAGE, re.MULTILINE)

    assert sorted(kind.__name__ for kind in MESSAGES if kind.__struct_config__.tag is not None) == sorted(
        listed
    )


def test_a_datagram_is_laid_out_so() -> None:
    """Magic, MAC, sender, number, nonce, body."""
    sender = len(MAGIC) + GOSSIP_MAC_BYTES
    positions = [len(MAGIC), sender, sender + ID_BYTES, sender + ID_BYTES + 8, HEAD_BYTES]

    assert f"| 0 | magic | `{MAGIC.decode()}` |" in PAGE
    for position, name in zip(positions, ("MAC", "sender", "number", "nonce", "body"), strict=True):
        assert f"| {position} | {name} |" in PAGE
    assert f"at most {MAX_DATAGRAM_BYTES:,} bytes" in PAGE
    assert f"*challenge* of {HEAD_BYTES} bytes: `{CHALLENGE_MAGIC.decode()}`" in PAGE
    assert f"the {WINDOW - 1:,} before it are remembered, of {MOST_SENDERS:,} senders" in " ".join(
        PAGE.split()
    )
    assert f"last {MOST_SENT} datagrams" in PAGE


def test_an_append_by_datagram_is_laid_out_so() -> None:
    """Magic, where the kernel finds the hash, sizes and limits, kinds of answer."""
    page = PAGE[PAGE.index("# Appends by datagram") : PAGE.index("# Between nodes")]

    assert f"| 0 | magic | `{datagram.QUESTION_MAGIC.decode()}` |" in page
    assert f"| 0 | magic | `{datagram.ANSWER_MAGIC.decode()}` |" in page
    assert f"| {HASH_POSITION} | partition hash |" in page
    assert 2 == page.count(f"| last {datagram.MAC_BYTES} | MAC |")
    assert f"At most {datagram.MAX_DATAGRAM_BYTES:,} bytes" in page
    assert f"1 to {datagram.LONGEST_TOPIC_BYTES}" in page
    assert f"or than {datagram.SMALLEST_ANSWER_LIMIT}" in page
    assert f"Above {MOST_WAITING:,} questions" in page
    for kind in datagram.AnswerKind:
        assert f"| {kind.value} | `{kind.name}` |" in page
