"""A node's first process: forks the others and watches them. No event loop, no thread.

It is a zygote: everything is imported before the first fork, so a child costs milliseconds, and every
listener's socket stays open here while children come and go, so connections wait for a successor and the
kernel's order of the shared port's sockets never changes. It begins to listen on the shared port when the
shards answer. It decides when a child is started again and when the node ends. What a child does is not known
here: each is a function `run(boot) -> exit code`.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from laminar.log import DamagedDocument, StorageError
from laminar.log.disk.errors import NewerFormat
from laminar.node.access import first_token
from laminar.node.entry_points import EntryPoints
from laminar.node.host import machine
from laminar.node.host.certificates import Certificates
from laminar.node.host.failed_logs import EXIT_TO_RECOVER, FORGIVEN_MS
from laminar.node.host.fork import EXIT_UNRECOVERABLE, Unrecoverable, fork
from laminar.node.host.log_setup import set_up_logging
from laminar.node.host.restart_policy import RESTARTS_IN_WINDOW, RestartPolicy
from laminar.node.host.settings import TOKENS, Settings
from laminar.node.runtime.boot import (
    ANSWERS,
    CONTROLLER,
    READY,
    Addresses,
    Boot,
    ChildState,
    Role,
    StatusBoard,
    node_roles,
    role_name,
)
from laminar.node.runtime.data_folder import (
    DataFolder,
    Identity,
)
from laminar.node.runtime.environment import Environment
from laminar.node.runtime.listeners import NodeSockets
from laminar.node.runtime.steering import Steering
from laminar.node.secret.keyring import Keyring

log = logging.getLogger("laminar.supervisor")

EXIT_DONE, EXIT_FAILED = 0, 1
_GRACE_MS = 2_000
"""Children drain for `drain_ms` and then end; what has not ended this much later is killed."""
PASSED_ON_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, *PASSED_ON_SIGNALS)
# Advice for the operator.
DAMAGED_DOCUMENT = (
    "Restore an intact copy of one of these files; or, where other nodes hold replicas of all that this one "
    "holds, move its data folder away and start it again under another name"
)


@dataclass(slots=True)
class _Child:
    role: Role
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    pid: int = 0
    pidfd: int = -1
    report_fd: int = -1
    answers: bool = False
    """It has reported, once at least, that it answers HTTP requests."""
    state: ChildState = ChildState.STARTING
    restarts: int = 0
    start_at_ms: int | None = None
    """When a dead child is to be started again, in ms of the monotonic clock; None: not planned."""
    started_at_ms: int = 0
    recovery_restarts: int = 0
    """How often in a row it ended with `EXIT_TO_RECOVER`, to recover logs that had failed."""

    @property
    def has_died(self) -> bool:
        """Whether the child has ended at least once."""
        return self.restarts > 0 or self.state in (ChildState.DEAD, ChildState.GIVEN_UP)


class Supervisor:
    """Starts, watches and ends one node's child processes, and holds what they share."""

    def __init__(
        self,
        settings: Settings,
        shards: int,
        folder: DataFolder,
        sockets: NodeSockets,
        addresses: Addresses,
        entry_points: EntryPoints,
        *,
        environment: Environment | None = None,
        certificates: Certificates | None = None,
        secrets: Keyring | None = None,
    ) -> None:
        self._certificates = certificates
        self._secrets = Keyring() if secrets is None else secrets
        self._settings = settings
        self._environment = environment or Environment()
        self._shards = shards
        self._folder = folder
        self._sockets = sockets
        self._addresses = addresses
        self._entry_points = entry_points
        self._board = StatusBoard(shards)
        self._children = {role: _Child(role) for role in node_roles(shards)}
        self._claims = machine.CpuClaims()
        self._cpus = machine.plan_pinning(settings.pin, shards, self._claims)
        self._steering = Steering(settings.steer)
        self._selector = selectors.DefaultSelector()
        self._lifeline, self._lifeline_end = os.pipe()
        # The write end is closed when the shared port listens: children, later ones too, see the end of file.
        self._shared_port, self._shared_port_end = os.pipe()
        self._signal_pipe = os.pipe()
        self._signals: list[int] = []
        self._stop_signals = 0
        self._kill_at_ms: int | None = None
        self._killed = False
        self._unrecoverable = False
        self._said_ready = False

    # ---- life

    def run(self) -> int:
        """Recover, start the children, watch them, and end with them; return the exit code."""
        for end in self._signal_pipe:
            os.set_blocking(end, False)
        self._selector.register(self._signal_pipe[0], selectors.EVENT_READ, self._take_signals)
        with self._handling_signals():
            try:
                return self._run()
            finally:
                self._kill_all()
                self._steering.end()
                self._folder.remove_node_file()
                self._sockets.close()
                self._claims.release()
                self._folder.close()

    def _run(self) -> int:
        self._folder.remove_node_file()
        if not self._settings.secret:
            log.info("no secret is set: every listener is on loopback (%s) only", self._settings.host)
        if self._settings.is_insecure:
            log.warning(
                "insecure is set: %s, and every program that reaches %s, or the network between, may read, "
                "write and delete everything",
                " and ".join(self._settings.lacks),
                self._settings.host,
            )
        gc.collect()
        gc.freeze()  # so that the children's collectors don't write to, and thus copy, the pages they share
        if not self._steering.begin(self._sockets, self._cpus, self._fork):
            return EXIT_FAILED
        if not self._recover():
            return EXIT_FAILED
        for child in self._children.values():
            if not self._stop_signals:
                self._start(child)
        while self._alive() or (not self._stop_signals and self._waiting()):
            self._turn()
        if self._stop_signals:
            log.info(
                "stopped%s",
                "; processes that did not end within drain_ms were killed" if self._killed else "",
            )
            return EXIT_FAILED if self._killed or self._unrecoverable else EXIT_DONE
        log.error("this node ends: all of its processes died too often")
        return EXIT_FAILED

    def _turn(self) -> None:
        """Wait for the next event, and handle it."""
        for key, _ in self._selector.select(self._timeout_s()):
            key.data()
        now_ms = _now_ms()
        for child in self._children.values():
            if child.start_at_ms is not None and now_ms >= child.start_at_ms and not self._stop_signals:
                child.start_at_ms = None
                child.restarts += 1
                self._start(child)
        if self._kill_at_ms is not None and now_ms >= self._kill_at_ms:
            log.warning(
                "processes of this node still run %d ms after the order to stop (drain_ms): they are killed",
                self._settings.drain_ms,
            )
            self._kill_all()

    def _timeout_s(self) -> float | None:
        instants = [child.start_at_ms for child in self._waiting()]
        instants.append(self._kill_at_ms)
        due = [instant for instant in instants if instant is not None]
        return max(0.0, (min(due) - _now_ms()) / 1000) if due else None

    def _alive(self) -> list[_Child]:
        return [child for child in self._children.values() if child.pid]

    def _waiting(self) -> list[_Child]:
        return [child for child in self._children.values() if child.start_at_ms is not None]

    def _recover(self) -> bool:
        """Run recovery in a child, so that its memory is freed and its failure is an exit code.

        Return whether the node may go on: also True after a request to stop, which kills the recovery.
        """
        began_ms = _now_ms()
        directory, shards = self._folder.directory, self._shards

        def work() -> int:
            try:
                self._entry_points.recover(directory, shards)
            except DamagedDocument as error:
                raise Unrecoverable(f"{error}. {DAMAGED_DOCUMENT}") from error
            except NewerFormat as error:
                raise Unrecoverable(str(error)) from error
            return EXIT_DONE

        recovery = _Child(CONTROLLER)
        recovery.pid = self._fork("recovery", work)
        recovery.pidfd = os.pidfd_open(recovery.pid)
        codes: list[int] = []
        self._selector.register(
            recovery.pidfd, selectors.EVENT_READ, lambda: codes.append(self._reap(recovery))
        )
        asked = False
        while not codes:
            for key, _ in self._selector.select():
                key.data()
            if self._stop_signals and not asked and not codes:
                os.kill(
                    recovery.pid, signal.SIGKILL
                )  # harmless, like a loss of power: recovery can be repeated
                asked = True
        if self._stop_signals:
            return True
        if codes[0] != EXIT_DONE:
            log.error("recovery of %s failed (%s)", directory, _how_it_ended(codes[0]))
            return False
        log.info("recovered in %d ms", _now_ms() - began_ms)
        return True

    # ---- children

    def _start(self, child: _Child) -> None:
        child.started_at_ms = _now_ms()
        if self._certificates is not None and child.restarts:
            self._certificates.refresh()
        if child.restarts:
            self._secrets.refresh()
        report, report_end = os.pipe()
        identity = self._identity() if child.restarts else self._folder.identity
        role = child.role
        sockets = self._sockets.for_child(role)
        boot = Boot(
            settings=self._settings,
            data_directory=self._folder.directory,
            cluster_id=identity.cluster_id or None,
            store_id=identity.store_id,
            node=identity.node,
            role=role,
            recovery_restarts=child.recovery_restarts,
            shards=self._shards,
            nonce=os.urandom(16),
            http_shared=sockets.http_shared,
            http_own=sockets.http_own,
            peer=sockets.peer,
            gossip=sockets.gossip,
            datagrams=sockets.datagrams,
            certificates=self._certificates,
            secrets=self._secrets,
            addresses=self._addresses,
            board=self._board,
            lifeline=self._lifeline,
            report_fd=report_end,
            shared_port_fd=self._shared_port,
            founding=identity.founding,
            epoch=identity.epoch,
            record_cluster=self._folder.record_cluster,
            boot_history=identity.boot_history,
            record_boot_history=self._folder.record_boot_history,
            has_peers=identity.has_peers,
            record_has_peers=self._folder.record_has_peers,
            folder_version=identity.format_version,
            record_folder_version=self._folder.record_format_version,
            environment=self._environment,
        )

        def work() -> int:
            os.close(report)
            self._sockets.close_all_but(sockets)
            if isinstance(role, str):
                if self._steering.controller_cpu is not None:
                    os.sched_setaffinity(0, {self._steering.controller_cpu})
                return self._entry_points.controller(boot)
            if self._cpus is not None:
                os.sched_setaffinity(0, {self._cpus[role]})
            return self._entry_points.shard(boot)

        self._set_state(child, ChildState.STARTING)
        child.pid = self._fork(role_name(role), work)
        os.close(report_end)
        child.report_fd = report
        child.pidfd = os.pidfd_open(child.pid)
        self._selector.register(report, selectors.EVENT_READ, lambda: self._take_report(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._take_death(child))
        self._set_state(child, ChildState.STARTING)

    def _fork(self, name: str, work: Callable[[], int]) -> int:
        """Fork a child that closes the supervisor's own descriptors and then runs `work`; return its pid."""

        def child() -> int:
            self._selector.close()
            self._steering.let_go()
            for fd in (*self._signal_pipe, self._lifeline_end):
                os.close(fd)
            self._close_shared_port_end()
            for sibling in self._children.values():
                for fd in (sibling.pidfd, sibling.report_fd):
                    if fd >= 0:
                        os.close(fd)
            set_up_logging(
                process=f"{self._folder.identity.node} {name}",
                level=self._settings.log_level,
                style=self._settings.log_format,
            )
            return work()

        return fork(name, child, handled_signals=HANDLED_SIGNALS)

    def _take_report(self, child: _Child) -> None:
        said = os.read(child.report_fd, len(ANSWERS + READY))
        if said:
            child.answers = True
            self._listen_if_due()
        if said == ANSWERS:
            return
        self._forget_fd(child.report_fd)
        child.report_fd = -1
        if not said:
            return  # the child died, which closed the pipe: `_take_death` handles that
        self._set_state(child, ChildState.READY)
        complete = self._write_node_file()
        log.info("%s is ready (pid %d)", role_name(child.role), child.pid)
        if complete and not self._said_ready:
            self._said_ready = True
            url, node = self._url(), self._folder.identity.node
            log.info("node %s is ready: %s, %d shards", node, url, self._shards)
            token_file = os.path.join(self._folder.directory, first_token.FILE)
            if self._settings.access == TOKENS and os.path.exists(token_file):
                log.info("clients need a token; the first one, of an admin, is in %s", token_file)
            machine.notify_service_manager("READY=1", os.environ)

    def _listen_if_due(self) -> None:
        """Begin to listen on the shared port once the shards answer; those that died are not waited for.

        The requests that reach the socket of a shard that died wait for its successor, as when it dies later.
        """
        shards = [child for child in self._children.values() if child.role != CONTROLLER]
        awaited = [child for child in shards if not child.answers and not child.has_died]
        if awaited or not any(child.answers for child in shards) or self._stop_signals:
            return
        if self._shared_port_end < 0:
            return  # it listens
        try:
            given_up = [child.role for child in shards if child.state is ChildState.GIVEN_UP]
            self._sockets.listen_on_shared_port(given_up=given_up)
        except OSError as error:
            log.critical("%s, so this node ends", error)
            self._unrecoverable = True
            self._stop()
            return
        self._close_shared_port_end()

    def _close_shared_port_end(self) -> None:
        if self._shared_port_end >= 0:
            os.close(self._shared_port_end)
            self._shared_port_end = -1

    def _take_death(self, child: _Child) -> None:
        self._note_death(child)
        self._listen_if_due()

    def _note_death(self, child: _Child) -> None:
        pid = child.pid
        code = self._reap(child)
        how = _how_it_ended(code)
        if self._stop_signals:
            self._set_state(child, ChildState.DEAD)
            return
        if code == EXIT_UNRECOVERABLE:
            self._set_state(child, ChildState.GIVEN_UP)
            self._unrecoverable = True
            log.critical("%s (pid %d) can't go on, so this node ends", role_name(child.role), pid)
            self._stop()
            return
        if code == EXIT_TO_RECOVER:
            now_ms = _now_ms()
            forgiven = now_ms - child.started_at_ms >= FORGIVEN_MS
            child.recovery_restarts = 1 if forgiven else child.recovery_restarts + 1
            self._set_state(child, ChildState.DEAD)
            child.start_at_ms = now_ms
            log.warning("%s (pid %d) starts again to bring back what failed", role_name(child.role), pid)
            return
        pause_ms = child.policy.died(now_ms=_now_ms())
        if pause_ms is None:
            self._set_state(child, ChildState.GIVEN_UP)
            self._sockets.stop_listening(child.role)
            name, limit = role_name(child.role), RESTARTS_IN_WINDOW
            log.critical(
                "%s (pid %d) ended: %s; not started again after %d restarts in a minute",
                name,
                pid,
                how,
                limit,
            )
            machine.notify_service_manager(f"STATUS={name} is not started again", os.environ)
            if self._has_no_shard_left():
                log.critical("no shard of this node is left, so it ends")
                self._unrecoverable = True
                self._stop()
                return
            self._write_node_file()
            return
        self._set_state(child, ChildState.DEAD)
        child.start_at_ms = _now_ms() + pause_ms
        log.error("%s (pid %d) ended: %s; starts again in %d ms", role_name(child.role), pid, how, pause_ms)

    def _has_no_shard_left(self) -> bool:
        """Return whether no shard is started again: no HTTP port is left, not even for `/readyz`."""
        shards = [child for child in self._children.values() if child.role != CONTROLLER]
        return all(child.state is ChildState.GIVEN_UP for child in shards)

    def _reap(self, child: _Child) -> int:
        """Return a dead child's exit code (negative: the signal), and close our descriptors for the child."""
        _, status = os.waitpid(child.pid, 0)
        self._forget_fd(child.pidfd)
        child.pid, child.pidfd = 0, -1
        if child.report_fd >= 0:
            self._forget_fd(child.report_fd)
            child.report_fd = -1
        return os.waitstatus_to_exitcode(status)

    def _forget_fd(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _set_state(self, child: _Child, state: ChildState) -> None:
        child.state = state
        self._board.write(child.role, state=state, pid=child.pid, restarts=child.restarts)

    def _write_node_file(self) -> bool:
        """Write `node.json` if every child either serves or is not started again any more.

        Return whether that is so. A failed write is only logged.
        """
        states = [child.state for child in self._children.values()]
        if any(state not in (ChildState.READY, ChildState.GIVEN_UP) for state in states):
            return False
        identity = self._identity()
        content = msgspec.to_builtins(self._addresses) | {
            "node": identity.node,
            "url": self._url(),
            "shards": self._shards,
            "cluster_id": identity.cluster_id.hex(),
            "store_id": identity.store_id.hex(),
            "pid": os.getpid(),
            "pids": {role_name(child.role): child.pid for child in self._children.values()},
        }
        try:
            self._folder.write_node_file(content)
        except StorageError as error:
            log.error("others can't find this node: %s", error)
        return True

    def _identity(self) -> Identity:
        """Return the identity as it is now: the controller may have joined a cluster since."""
        try:
            return self._folder.read_identity()
        except StorageError as error:
            # A node that serves doesn't end for this; a child without a cluster id asks the controller.
            log.error("%s", error)
            return self._folder.identity

    def _url(self) -> str:
        name = self._addresses.host
        return f"{self._settings.scheme}://{f'[{name}]' if ':' in name else name}:{self._addresses.http_port}"

    # ---- the end

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note_signal) for number in HANDLED_SIGNALS}
        wakeup = signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            for fd in (*self._signal_pipe, self._lifeline, self._lifeline_end, self._shared_port):
                os.close(fd)
            self._close_shared_port_end()

    def _note_signal(self, number: int, frame: object) -> None:
        # Python calls this between two instructions of whatever runs: only note it. The pipe wakes the
        # selector.
        self._signals.append(number)

    def _take_signals(self) -> None:
        os.read(self._signal_pipe[0], 4096)
        while self._signals:
            number = self._signals.pop(0)
            if number in PASSED_ON_SIGNALS:
                self._send_signal(number)
            else:
                if not self._stop_signals:
                    log.info("stopping (%s)", signal.Signals(number).name)
                self._stop()

    def _stop(self) -> None:
        self._stop_signals += 1
        if self._stop_signals > 1:
            log.warning("second request to stop: the processes of this node are killed")
            self._kill_all()
            return
        machine.notify_service_manager("STOPPING=1", os.environ)
        self._folder.remove_node_file()
        self._sockets.close()  # from now on connections are accepted only by children that still listen
        self._kill_at_ms = _now_ms() + self._settings.drain_ms + _GRACE_MS
        self._send_signal(signal.SIGTERM)

    def _send_signal(self, number: int) -> None:
        for child in self._alive():
            signal.pidfd_send_signal(child.pidfd, number)

    def _kill_all(self) -> None:
        self._kill_at_ms = None
        alive = self._alive()
        self._killed = self._killed or bool(alive)
        for child in alive:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def _how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
