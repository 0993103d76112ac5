"""Authenticate datagrams by their MACs, and check whether the sender may append.

The keys of a credential are derived when its first question (request by datagram) comes, and dropped with the
credential. So a question from any sender costs one look-up and one MAC, and unknown senders use no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laminar.http.api.problems import Problem
from laminar.node.access.guard import principal_of_record
from laminar.node.access.meters import Meter
from laminar.node.access.principals import unauthorized
from laminar.node.api.common.services import ShardServices
from laminar.node.host.settings import TOKENS
from laminar.node.secret.keys import Keys
from laminar.wire.datagram import MINUTES_VALID, DatagramCodec, Forged, Malformed, Question, credential_of
from membership.records import CredentialRecord

MINUTE_MS = 60_000


class MalformedUnder(Exception):
    """An authentic question is malformed, as `fault` says; `codec` encodes the answer to its sender."""

    def __init__(self, fault: Malformed, codec: DatagramCodec) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.codec = codec


class Proofs:
    """The datagram codecs of one shard: one for each credential's key, or without tokens the cluster's."""

    def __init__(self, services: ShardServices, meter_of: Callable[[str], Meter] | None) -> None:
        """Create the codecs; `meter_of` returns the meter of a principal's requests, None to count none."""
        self._services = services
        self._meter_of = meter_of
        self._secrets: tuple[Keys, ...] | None = None
        self._credentials: Mapping[str, CredentialRecord] = services.view.credentials
        self._of_secrets: list[DatagramCodec] = []
        self._of_credentials: dict[str, list[DatagramCodec]] = {}

    def opened(self, datagram: bytes) -> tuple[Question, DatagramCodec]:
        """Return the question in a datagram, and the codec of its sender, for the answer.

        Raises:
            Forged: no valid key has signed the datagram; the credential may be revoked.
            MalformedUnder: a valid key has signed it, but it cannot be decoded.
        """
        self._follow()
        for codec in self._codecs(credential_of(datagram)):
            try:
                return codec.decode_question(datagram), codec
            except Forged:
                continue
            except Malformed as fault:
                raise MalformedUnder(fault, codec) from fault
        raise Forged

    def check(self, question: Question, size: int) -> str:
        """Return the name of the principal that sent a question, if it may append to the topic.

        The question is counted as a request of its principal, with `size` bytes. Without access control the
        name is "". A question that was sent long ago is refused.

        Raises:
            Problem: 401 `unauthorized`, 403 `forbidden`, 422 `invalid` (the minute), 429 `quota`.
        """
        if not question.credential:
            return ""
        now_ms = self._services.clock.wall_ms()
        record = self._credentials[question.credential]
        if record.expires_ms and now_ms >= record.expires_ms:
            raise unauthorized("the token has expired")
        minute = now_ms // MINUTE_MS
        if abs(question.minute - minute) > MINUTES_VALID:
            raise Problem(
                "invalid",
                f"the datagram's minute differs from the node's clock by more than {MINUTES_VALID} minutes",
                field="minute",
                value=question.minute,
                limit=minute,
                outcome="not_applied",
            )
        principal_of_record(record, self._credentials).require("write", question.topic)
        if self._meter_of is not None:
            meter = self._meter_of(record.name)
            if meter.is_limited:
                meter.admit(size, self._services.clock.monotonic_ms())
        return record.name

    def _follow(self) -> None:
        """Drop the codecs of earlier secrets and credentials, if the node's have changed."""
        secrets, credentials = self._services.secrets.current, self._services.view.credentials
        if secrets is not self._secrets:
            self._secrets = secrets
            self._of_credentials.clear()
            asks = self._services.settings.access == TOKENS
            known = [keys.secret for keys in secrets] or [b""]
            self._of_secrets = [] if asks else [DatagramCodec(secret) for secret in known]
        if credentials is not self._credentials:
            self._credentials = credentials
            self._of_credentials.clear()

    def _codecs(self, credential: str) -> list[DatagramCodec]:
        if not credential:
            return self._of_secrets
        codecs = self._of_credentials.get(credential)
        if codecs is None and credential in self._credentials and self._secrets:
            codecs = [DatagramCodec(keys.datagrams_of(credential)) for keys in self._secrets]
            self._of_credentials[credential] = codecs
        return codecs or []
