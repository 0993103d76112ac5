"""PySyncObj's replicated objects without PySyncObj's Raft: the one place that touches its private parts.

PySyncObj 0.3.17 numbers the ``@replicated`` methods of some objects, turns a call into bytes, and later, when
those bytes are committed, performs the call everywhere. To commit them it has its own Raft, network and file,
none of which can be trusted with a cluster's metadata (docs/decisions/ says why). This module leaves these
out:

* ``_applyCommand`` (an override) hands the encoded call to us instead of to its queue;
* ``_SyncObj__doApplyCommand`` (a private call) performs a committed one;
* it gets no peers, no tick, no file, and a transport that refuses to send. So it makes no thread, socket or
  file.

A call is encoded with `pickle`. That is harmless for two reasons: only bytes from our own authenticated log
come here, and a command is performed only when its pickle consists of numbers, texts and containers of them;
a pickle that names a class or a function is refused before PySyncObj loads it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import pysyncobj
import pysyncobj.pickle
from pysyncobj.syncobj import SyncObjExceptionWrongVer
from pysyncobj.transport import Transport

PINNED_VERSION = "0.3.17"
"""The release whose source was read for this module; a test compares it with the installed one."""

Replicated: TypeAlias = pysyncobj.SyncObjConsumer
"""Base class of a replicated object: attributes set after `__init__` are its state."""

Method = TypeVar("Method", bound=Callable[..., Any])

# PySyncObj's decorator finds the class body two stack frames above, so it can't be wrapped in a function.
replicated = cast("Callable[[Method], Method]", pysyncobj.replicated)
# For methods that came later: `@replicated_since(ver=1)`.
replicated_since = cast("Callable[..., Callable[[Method], Method]]", pysyncobj.replicated)

# The first byte of a command: PySyncObj's _COMMAND_TYPE. Its other two kinds (no-op, membership) are never
# made.
_REGULAR = 0
_VERSION = 3


class BadCommand(ValueError):
    """A command that PySyncObj's encoding of our calls can't have produced; nothing was performed."""


class UnknownCodeVersion(RuntimeError):
    """The cluster enabled replicated methods that this program lacks: it must not apply any further."""


class _RefusingTransport(Transport):  # type: ignore[misc]  # pysyncobj has no types
    """Ready from the start, connects to no peer, sends nothing."""

    def __init__(self) -> None:
        super().__init__(None, None, [])

    def send(self, node: object, message: object) -> bool:
        raise AssertionError(f"the replicated objects tried to talk to {node!r}")


class ReplicatedObjects(pysyncobj.SyncObj):  # type: ignore[misc]  # pysyncobj has no types
    """Holds replicated objects; encodes calls of their methods as commands, and performs commands on them.

    ``objects`` must be the same classes in the same order on every node: a call is encoded as its method's
    number. Numbers follow (code version, object, name), so a method added later takes ``ver=`` one higher
    than all before.
    """

    def __init__(self, objects: Sequence[Replicated], *, newest: int = 0) -> None:
        """Hold `objects`; `newest` is this program's code version, if no method has it as its version."""
        self._encoded: list[bytes] = []
        conf = pysyncobj.SyncObjConf(autoTick=False, dynamicMembershipChange=False)
        super().__init__(None, [], conf=conf, consumers=list(objects), transport=_RefusingTransport())
        # PySyncObj knows versions of methods only; a version may also change the rules of a method.
        versions = (method.ver for method in self._idToMethod.values())
        self._newest = self._SyncObj__selfCodeVersion = max(newest, *versions)

    def _applyCommand(self, command: bytes, callback: object, commandType: int | None = None) -> None:
        # PySyncObj's name and signature. It would queue the command for its own leader.
        assert callback is None, "results come with apply, not with the call"
        self._encoded.append(bytes([_REGULAR if commandType is None else commandType]) + command)

    def encode(self, method: Callable[..., Any], *arguments: int | str) -> bytes:
        """Return the command that performs ``method(*arguments)`` when it is given to `perform`."""
        method(*arguments)
        assert len(self._encoded) == 1, f"{method!r} is not a replicated method of these objects"
        return self._encoded.pop()

    def perform(self, command: bytes) -> Any:
        """Perform one committed command and return what its method returned.

        A command that enables a code version below the enabled one changes nothing: a leader may have
        proposed it from an old state.

        Raises:
            BadCommand: `encode` did not make these bytes; nothing happened.
            UnknownCodeVersion: the cluster enabled methods that this program lacks.
        """
        call = _loaded(command)
        if command[0] == _VERSION and call < self.code_version():
            return None
        try:
            return self._SyncObj__doApplyCommand(command)
        except SyncObjExceptionWrongVer as error:
            raise UnknownCodeVersion(
                f"the cluster has enabled code version {error.ver}, and this program knows "
                f"{self._newest}: start this node with a newer program"
            ) from error

    def code_version(self) -> int:
        """Return the highest version of replicated methods that the cluster has enabled."""
        return cast("int", self.getCodeVersion())

    def encode_code_version(self, version: int) -> bytes:
        """Return the command that enables the methods of `version`."""
        return bytes([_VERSION]) + cast("bytes", pysyncobj.pickle.dumps(version))


def _loaded(command: bytes) -> Any:
    """Return the value in a command's pickle; raise `BadCommand` if it is more than data."""
    if len(command) < 2 or command[0] not in (_REGULAR, _VERSION):
        raise BadCommand(f"not a replicated call: {bytes(command[:16])!r}")
    try:
        return _DataOnly(io.BytesIO(command[1:])).load()
    except (BadCommand, MemoryError):
        raise
    except Exception as error:  # pickle answers malformed input with many types
        raise BadCommand(f"not a pickle: {error}") from error


class _DataOnly(pickle.Unpickler):
    """Loads numbers, texts and containers of them: whatever names a class or function is refused.

    Without a class or function there is nothing that a pickle could call.
    """

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise BadCommand(f"names code: {module_name}.{global_name}")

    def persistent_load(self, pid: object) -> Any:
        raise BadCommand(f"names an object outside: {pid!r}")
