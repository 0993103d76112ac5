"""The proof of a datagram's sender: the cluster's secret, or a key of the client's credential.

A cluster that asks for tokens gives a client, over HTTP and once it has shown its token, a key for datagrams.
With it the client needs no secret of the cluster, and may append what its grants permit. Such a datagram says
the minute by the cluster's clock, so that a copy of it is of no use for long. This client counts the minutes
from the one that came with the key; where a node's clock differs, the node says so.
"""

from __future__ import annotations

import os

from laminar.client.errors import ConfigError
from laminar.client.net.session import Session
from laminar.wire.datagram import Answer, DatagramCodec, Forged, Question, room_bytes

# The principal of all requests to a node that asks for no tokens.
ANONYMOUS = "anonymous"
# A key is asked for again, when nothing is answered, at most this often.
RENEW_S = 5.0
MINUTE_S = 60.0


class DatagramProof:
    """The means by which one client authenticates its datagrams to one cluster."""

    def __init__(self, session: Session, secret: str | None) -> None:
        """Use `secret` (None: ``LAMINAR_SECRET``) unless `begin` finds that the cluster asks for tokens."""
        if secret is None:
            secret = os.environ.get("LAMINAR_SECRET", "")
        self.credential = ""
        self._session = session
        self._codec = DatagramCodec(secret.encode())
        # Answers to copies that were sent under the last key may still come.
        self._former = self._codec
        self._key = ""
        self._minute = 0.0
        self._renewed_s = 0.0

    def room_bytes(self, topic: str) -> int:
        """Return how large a batch for this topic may be, in bytes, as far as is known now."""
        return room_bytes(topic, self.credential)

    async def begin(self) -> None:
        """Ask the cluster whether it asks for tokens, and for a key if so.

        Raises:
            ConfigError: (`no_datagrams`) it asks for tokens, and its program has no keys for datagrams yet.
            Error: the token is not accepted.
        """
        self._renewed_s = self._session.loop.time()
        answer = await self._session.call("GET", "/v1/datagram-key", accept=(404,))
        if answer.status == 404:
            await self._check_older()
            return
        given = answer.json()
        if not given["credential"]:
            return
        self.credential = given["credential"]
        self.set_minute(given["minute"])
        if given["key"] != self._key:
            self._key = given["key"]
            self._former, self._codec = self._codec, DatagramCodec(bytes.fromhex(self._key))

    async def _check_older(self) -> None:
        """Raise `ConfigError` if a cluster of an older program asks for tokens: it takes no datagrams."""
        answer = await self._session.call("GET", "/v1/whoami", accept=(404,))
        if answer.status == 200 and answer.json().get("principal") != ANONYMOUS:
            raise ConfigError(
                "the cluster asks for tokens, and its nodes take no datagrams: their program is older",
                code="no_datagrams",
                hint="append over HTTP, by `append` or a producer, or upgrade the nodes",
            )

    async def renew(self) -> None:
        """Request the key again, because no datagram is answered; the key changes with the cluster's secret.

        Raises:
            Error: the token is not accepted any more.
        """
        if self.credential and self._session.loop.time() - self._renewed_s >= RENEW_S:
            await self.begin()

    def set_minute(self, minute: int) -> None:
        """Note the minute that a node's clock shows now."""
        self._minute = minute + 0.5 - self._session.loop.time() / MINUTE_S

    def question(self, question: Question) -> bytes:
        """Return the datagram of a question, as it is to be sent now."""
        if self.credential:
            minute = int(self._minute + self._session.loop.time() / MINUTE_S)
            question = question.by(self.credential, minute)
        return self._codec.encode_question(question)

    def answer(self, datagram: bytes) -> Answer:
        """Return the answer in a datagram.

        Raises:
            Forged: no node that knows our key has made it.
        """
        try:
            return self._codec.decode_answer(datagram)
        except Forged:
            return self._former.decode_answer(datagram)
