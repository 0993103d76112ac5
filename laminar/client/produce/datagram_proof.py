"""The authentication of a client's datagrams: by the cluster's secret, or by a key for the client's token.

A cluster that requires tokens gives each client, over HTTP, a key for datagrams that belongs to its token. So
the client needs no secret of the cluster, and may append what its grants permit. Such a datagram contains the
present minute of the cluster's clock, so that a recorded copy soon becomes useless. The client counts the
minutes from the one that came with the key; a node whose clock differs answers with its own.
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
    """The secret or key with which one client signs its datagrams and checks the answers of the cluster."""

    def __init__(self, session: Session, secret: str | None) -> None:
        """Use `secret` (None: ``LAMINAR_SECRET``) unless `begin` finds that the cluster requires tokens."""
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
        """Return how many bytes of a batch fit into a datagram for this topic; fewer if a key is used."""
        return room_bytes(topic, self.credential)

    async def begin(self) -> None:
        """Find out whether the cluster requires tokens; if so, request a key for datagrams.

        Raises:
            ConfigError: (`no_datagrams`) the cluster requires tokens, but its nodes are too old to give keys.
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
        """Raise `ConfigError` if a cluster of an older version requires tokens: it takes no datagrams."""
        answer = await self._session.call("GET", "/v1/whoami", accept=(404,))
        if answer.status == 200 and answer.json().get("principal") != ANONYMOUS:
            raise ConfigError(
                "the cluster asks for tokens, and its nodes take no datagrams: their program is older",
                code="no_datagrams",
                hint="append over HTTP, by `append` or a producer, or upgrade the nodes",
            )

    async def renew(self) -> None:
        """Request the key again, at most each 5 s, because no datagram is answered: it may have changed.

        Raises:
            Error: the token is not accepted any more.
        """
        if self.credential and self._session.loop.time() - self._renewed_s >= RENEW_S:
            await self.begin()

    def set_minute(self, minute: int) -> None:
        """Set the minute of the cluster's clock, as a node reported it now."""
        self._minute = minute + 0.5 - self._session.loop.time() / MINUTE_S

    def question(self, question: Question) -> bytes:
        """Return the signed datagram for `question`, with the present minute if a key is used."""
        if self.credential:
            minute = int(self._minute + self._session.loop.time() / MINUTE_S)
            question = question.by(self.credential, minute)
        return self._codec.encode_question(question)

    def answer(self, datagram: bytes) -> Answer:
        """Return the answer in a datagram that was received.

        Raises:
            Forged: the datagram is not signed with our secret or key.
        """
        try:
            return self._codec.decode_answer(datagram)
        except Forged:
            return self._former.decode_answer(datagram)
