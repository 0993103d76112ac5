"""The structs of consensus that processes send and store: a keepalive, and the body of a configuration entry.

They are apart from the frames that carry them (`raft_frames`), because a module with structs is not compiled.
"""

from __future__ import annotations

import msgspec

from laminar.batch import Buffer
from raft.configuration import Configuration
from raft.messages import Natural


class Keepalive(msgspec.Struct, frozen=True, array_like=True):
    """A sign of life of a process, with questions about quiesced groups, and answers to such questions.

    It does not name the sender's incarnation, which is known from the nonce in the connection's handshake.
    """

    asks: list[tuple[bytes, Natural]] = []
    """(group, term): the sender asks whether the receiver leads this quiesced group in this term."""
    wakes: list[bytes] = []
    """Groups that the sender does not lead, or not quiesced: the receiver must not stay quiesced there."""


# Most keepalives ask nothing and answer nothing, and there are many.
PLAIN_KEEPALIVE = Keepalive()


class ConfigurationRecord(msgspec.Struct, frozen=True, array_like=True):
    """Body of a `configuration` batch: (replica id, node) of voters and of learners.

    `abandoned` are the ids of former members that an operator's decision abandoned. `successor_of` is used
    only in entry 1: the id of the change of routes that created the partition, or 0.
    """

    voters: tuple[tuple[int, str], ...]
    learners: tuple[tuple[int, str], ...] = ()
    abandoned: tuple[int, ...] = ()
    successor_of: int = 0

    def configuration(self) -> Configuration:
        """Return the configuration as the Raft core uses it: replica ids without nodes."""
        return Configuration(
            voters=tuple(replica for replica, _ in self.voters),
            learners=tuple(replica for replica, _ in self.learners),
            abandoned=self.abandoned,
        )

    def nodes(self) -> dict[int, str]:
        """Return the node of each replica id."""
        return dict(self.voters) | dict(self.learners)

    def with_learner(self, replica_id: int, node: str) -> ConfigurationRecord:
        """Return the configuration with one more learner."""
        return ConfigurationRecord(self.voters, (*self.learners, (replica_id, node)), self.abandoned)

    def promoted(self, replica_id: int) -> ConfigurationRecord:
        """Return the configuration in which the learner `replica_id` is a voter."""
        (learner,) = (each for each in self.learners if each[0] == replica_id)
        others = tuple(each for each in self.learners if each is not learner)
        return ConfigurationRecord((*self.voters, learner), others, self.abandoned)

    def without(self, replica_id: int) -> ConfigurationRecord:
        """Return the configuration without the voter or learner `replica_id`."""
        return ConfigurationRecord(
            tuple(each for each in self.voters if each[0] != replica_id),
            tuple(each for each in self.learners if each[0] != replica_id),
            self.abandoned,
        )

    def encoded(self) -> bytes:
        """Return the record encoded as the payload of a `configuration` batch.

        `successor_of` is left out if it is 0, so that entry 1 has the same bytes on every replica, also on
        one whose program does not know the field.
        """
        if self.successor_of:
            return msgspec.msgpack.encode(self)
        return msgspec.msgpack.encode((self.voters, self.learners, self.abandoned))


def configuration_record(payload: Buffer) -> ConfigurationRecord:
    """Decode the payload of a `configuration` batch."""
    return msgspec.msgpack.decode(payload, type=ConfigurationRecord)
