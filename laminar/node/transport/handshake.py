"""The handshake of two processes, as pure values: which process is at the other end of a connection.

The initiator sends a `Hello`; the acceptor answers with its own and a proof; the initiator sends its proof
and may send frames at once. Each proof is an HMAC-SHA256 over *both* hellos, each of which carries a fresh
random challenge, so neither side can replay or reflect what it saw. The acceptor uses the first of its
secrets, the initiator the one that the acceptor has used. Without a secret both proofs are empty, and a side
that has a secret accepts no empty proof.

The secret and both hellos also make the keys of the frames that follow (`frame_keys`): so a relay that
passes the proofs on without knowing the secret can't add, change, repeat or reorder a frame. Programs before
code version 7 use the secret itself as the key of the proofs, and their frames carry checksums only. The
proofs cover the code version in each hello.

This module reads no socket, clock or randomness: `laminar.node.transport.transport` passes bytes and
challenges in.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from laminar.node.secret.keys import KEYS_SINCE, Keys

PROTOCOL_VERSION = 1
"""The version of the handshake. What is sent after it depends on the code version that is enabled."""
CHALLENGE_SIZE = 32
EPOCH_SIZE = 16
MAX_HANDSHAKE_BYTES = 4096
"""A frame before the end of the handshake is never longer, so no unknown process makes us reserve memory."""

MAX_NONCE_BYTES = 64
# As the setting `node`; role 0 is the controller's, others are one above their shard's number.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z", re.ASCII)
_MAX_ROLE = 1 << 16

_INITIATOR = b"laminar handshake: initiator"
_ACCEPTOR = b"laminar handshake: acceptor"


class Channel(IntEnum):
    """The purpose of a connection: each address has one connection for each channel."""

    CONTROL = 1
    """Votes, heartbeats, acknowledgements: small, bounded, never paused."""
    BULK = 2
    """Appends: under flow control in both directions."""
    CALL = 3
    """Calls and their answers (RPC); the only channel that a node without a cluster id may use."""


class HandshakeError(Exception):
    """The peer was refused. `.reason` is the counter's name in `Transport.statistics()`."""

    def __init__(self, reason: str, detail: str, *, outdated: bool = False) -> None:
        """Make a refusal; `outdated`: the peer has shown that the cluster was recovered without this node."""
        super().__init__(detail)
        self.reason = reason
        self.outdated = outdated


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """One side's handshake message; new fields go last and have defaults."""

    version: int
    cluster: bytes
    """16 bytes, or none while this node is joining."""
    node: str
    role: int
    """0 for the controller, k + 1 for shard k."""
    nonce: bytes
    """Drawn at each start of a process: a peer with another nonce than before was started again."""
    channel: int
    challenge: bytes
    history: bytes = b""
    """The boot history of its data folder, encoded by the caller."""
    epoch: bytes = b""
    """The last recovery of the cluster's catalog by an operator: `EPOCH_SIZE` bytes, of which the
    first 8 count recoveries; empty if there was none.
    """
    code_version: int = 1
    """The highest code version that the program knows (docs/upgrading.md)."""
    store_id: bytes = b""
    """The id of its data folder; empty from a program that does not say it."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The acceptor's answer: its hello as encoded bytes (the proofs cover them) and its proof."""

    hello: bytes
    proof: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encode_hello(hello: Hello) -> bytes:
    """Return a hello encoded: these bytes are sent, and the proofs cover them."""
    assert len(hello.challenge) == CHALLENGE_SIZE, f"challenge of {len(hello.challenge)} bytes"
    return _encode(hello)


def encode_reply(hello: bytes, proof: bytes) -> bytes:
    """Return the acceptor's answer, encoded."""
    return _encode(Reply(hello, proof))


def decode_reply(payload: bytes | memoryview) -> Reply:
    """Return an acceptor's answer.

    Raises:
        HandshakeError: these bytes are no such answer.
    """
    try:
        return _decode_reply(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError("malformed", f"answer to our hello can't be read: {error}") from error


def decode_hello(payload: bytes | memoryview) -> Hello:
    """Return a hello after checking its form.

    Raises:
        HandshakeError: it is malformed, or of another version.
    """
    try:
        hello = _decode_hello(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HandshakeError("malformed", f"hello can't be read: {error}") from error
    if hello.version != PROTOCOL_VERSION:
        raise HandshakeError("version", f"peer speaks version {hello.version}, we {PROTOCOL_VERSION}")
    if len(hello.challenge) != CHALLENGE_SIZE or len(hello.cluster) not in (0, 16):
        raise HandshakeError("malformed", "hello with a challenge or cluster id of a wrong length")
    if not _NODE.match(hello.node) or not 0 <= hello.role < _MAX_ROLE or len(hello.nonce) > MAX_NONCE_BYTES:
        raise HandshakeError("malformed", f"hello of {hello.node!r}, role {hello.role}: no node and role")
    if len(hello.epoch) not in (0, EPOCH_SIZE):
        raise HandshakeError("malformed", "hello with an epoch of a wrong length")
    if hello.channel not in (Channel.CONTROL, Channel.BULK, Channel.CALL):
        raise HandshakeError("malformed", f"hello for unknown channel {hello.channel}")
    return hello


def check_cluster(mine: bytes | None, hello: Hello) -> None:
    """Refuse a peer of another cluster; if one side has no cluster yet, only calls are allowed.

    Raises:
        HandshakeError: the peer is refused.
    """
    theirs = hello.cluster or None
    if mine is not None and mine == theirs:
        return
    if hello.channel == Channel.CALL and (mine is None or theirs is None):
        return
    names = [cluster.hex() if cluster else "none yet" for cluster in (theirs, mine)]
    raise HandshakeError("cluster", f"node {hello.node!r} is of cluster {names[0]}, we are of {names[1]}")


def check_epoch(mine: Hello, theirs: Hello) -> None:
    """Refuse a peer of the same cluster that follows another recovery of its catalog.

    Call it only once the peer has shown its proof: a process that is refused as outdated ends itself, which
    an unauthenticated peer must not be able to cause.

    Raises:
        HandshakeError: the epochs differ.
    """
    if not mine.cluster or not theirs.cluster or mine.epoch == theirs.epoch:
        return
    # The first eight bytes count the recoveries.
    if theirs.epoch[:8] > mine.epoch[:8]:
        detail = (
            f"the catalog of this cluster was recovered without this node (node {theirs.node!r} is of epoch "
            f"{theirs.epoch.hex()}, this one of {mine.epoch.hex() or 'none'}): what it holds was abandoned"
        )
        raise HandshakeError("epoch", detail, outdated=True)
    detail = (
        f"node {theirs.node!r} is of epoch {theirs.epoch.hex() or 'none'}, we are of {mine.epoch.hex()}: "
        "the catalog was recovered without it"
    )
    raise HandshakeError("epoch", detail)


def check_code_version(enabled: int, hello: Hello) -> None:
    """Refuse a member of the cluster whose program does not know the enabled code version.

    Such a peer would get messages that it cannot read. A node that is joining may connect: its request to
    join is then refused by `membership.catalog_rules.register_node`.

    Raises:
        HandshakeError: the peer's program is too old.
    """
    if hello.cluster and hello.code_version < enabled:
        raise HandshakeError(
            "version",
            f"the program of node {hello.node!r} is too old: it knows code version {hello.code_version}, and "
            f"the cluster has enabled {enabled}: start it with a program as new as that of the other nodes",
        )


class FrameKeys(NamedTuple):
    """The keys of the frames of one connection, by direction."""

    from_initiator: bytes
    from_acceptor: bytes


class Transcript(NamedTuple):
    """Both hellos as they were sent, from which proofs and frame keys are made.

    `derived` says that both programs derive keys from the secret (`laminar.node.secret.keys`); else the
    proofs use the secret itself.
    """

    initiator: bytes
    acceptor: bytes
    derived: bool

    def digests(self) -> bytes:
        """Return the hash of the initiator's hello followed by that of the acceptor's.

        Each is hashed by itself, so it is fixed where one ends and the other begins.
        """
        return hashlib.sha256(self.initiator).digest() + hashlib.sha256(self.acceptor).digest()

    def acceptor_proof(self, keys: Keys | None) -> bytes:
        """Return the proof by which the acceptor shows that it knows a secret; empty without one."""
        return self._proof(keys, _ACCEPTOR)

    def initiator_proof(self, keys: Keys | None) -> bytes:
        """Return the proof by which the initiator shows that it knows a secret; empty without one."""
        return self._proof(keys, _INITIATOR)

    def frame_keys(self, keys: Keys | None) -> FrameKeys | None:
        """Return the keys of the frames that follow; None without a secret, or with an older program."""
        if keys is None or not self.derived:
            return None
        both = self.digests()
        return FrameKeys(keys.frames_of(b"initiator", both), keys.frames_of(b"acceptor", both))

    def _proof(self, keys: Keys | None, label: bytes) -> bytes:
        if keys is None:
            return b""
        key = keys.handshake if self.derived else keys.secret
        return hmac.digest(key, label + self.digests(), "sha256")


def _knows_keys(mine: Hello, theirs: Hello) -> bool:
    return min(mine.code_version, theirs.code_version) >= KEYS_SINCE


def check_proof(expected: bytes, proof: bytes | memoryview) -> None:
    """Refuse a peer whose proof isn't the expected one (in constant time)."""
    if not hmac.compare_digest(expected, proof):
        raise HandshakeError("secret", "authentication failed: secrets differ")


class Initiator:
    """The handshake as the connecting side sees it: send `hello`, give the reply to `take_reply`."""

    def __init__(self, hello: Hello, secrets: Sequence[Keys], *, enabled: int = 0) -> None:
        """Begin; `enabled` is the code version that this process knows to be enabled."""
        self.hello = encode_hello(hello)
        self.frame_keys: FrameKeys | None = None
        """Set when the handshake is over; None: frames have checksums only."""
        self._mine = hello
        self._secrets = secrets
        self._enabled = enabled

    def take_reply(self, payload: bytes | memoryview) -> tuple[bytes, Hello]:
        """Check the acceptor's reply; return the proof to send in answer, and the acceptor's hello.

        Raises:
            HandshakeError: the acceptor is not one of our cluster.
        """
        reply = decode_reply(payload)
        theirs = decode_hello(reply.hello)
        transcript = Transcript(self.hello, reply.hello, _knows_keys(self._mine, theirs))
        keys = self._proven(transcript, reply.proof)
        check_cluster(self._mine.cluster or None, theirs)
        check_epoch(self._mine, theirs)
        check_code_version(self._enabled, theirs)
        self.frame_keys = transcript.frame_keys(keys)
        return transcript.initiator_proof(keys), theirs

    def _proven(self, transcript: Transcript, proof: bytes) -> Keys | None:
        """Return the keys of the secret that the acceptor has proved to know; None if there is no secret.

        Raises:
            HandshakeError: the acceptor's proof fits none of our secrets.
        """
        for keys in self._secrets:
            if hmac.compare_digest(transcript.acceptor_proof(keys), proof):
                return keys
        if self._secrets or proof:
            raise HandshakeError("secret", "authentication failed: secrets differ")
        return None


class Acceptor:
    """The handshake as the accepting side sees it: `take_hello` gives the reply, `take_proof` ends it."""

    def __init__(self, mine: Hello, secrets: Sequence[Keys], *, enabled: int = 0) -> None:
        """Begin; `enabled` as for the `Initiator`."""
        self.frame_keys: FrameKeys | None = None
        """Set when the handshake is over; None: frames have checksums only."""
        self._mine = mine
        self._keys = secrets[0] if secrets else None
        self._enabled = enabled
        self._theirs: Hello | None = None
        self._transcript: Transcript | None = None

    def take_hello(self, theirs: Hello, *, sent: bytes | memoryview) -> bytes:
        """Return the reply to the hello that `decode_hello` has read from the bytes that were `sent`.

        Raises:
            HandshakeError: the hello is refused.
        """
        if self._theirs is not None:
            raise HandshakeError("malformed", "greeted twice")
        check_cluster(self._mine.cluster or None, theirs)
        check_code_version(self._enabled, theirs)
        self._theirs = theirs
        mine = encode_hello(msgspec.structs.replace(self._mine, channel=theirs.channel))
        self._transcript = Transcript(bytes(sent), mine, _knows_keys(self._mine, theirs))
        return encode_reply(mine, self._transcript.acceptor_proof(self._keys))

    def take_proof(self, payload: bytes | memoryview) -> Hello:
        """Return the initiator's hello, now that its proof is checked.

        Raises:
            HandshakeError: the proof is wrong, or came too early.
        """
        if self._theirs is None or self._transcript is None:
            raise HandshakeError("malformed", "a proof before a hello")
        check_proof(self._transcript.initiator_proof(self._keys), payload)
        check_epoch(self._mine, self._theirs)
        self.frame_keys = self._transcript.frame_keys(self._keys)
        return self._theirs
