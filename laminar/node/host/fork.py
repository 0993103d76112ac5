"""One careful fork: a child that dies with its parent, handles its own signals, and never returns.

What the child does is not known here.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

log = logging.getLogger("laminar.supervisor")

EXIT_BUG = 70
EXIT_UNRECOVERABLE = 78
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Unrecoverable(Exception):
    """A failure that would also end each new start of this child: the node ends, and an operator must act.

    The text says what is wrong and what to do.
    """


def fork(name: str, work: Callable[[], int], *, handled_signals: Sequence[signal.Signals]) -> int:
    """Fork a child that runs `work` and exits with its result; return the child's pid.

    The exit code is 70 after an exception and 78 after `Unrecoverable`. `handled_signals` are those that this
    process has handlers for; the child starts without them.
    """
    assert threads() == 1, f"{threads()} threads before a fork"
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals wait until the child has its own handlers: ours would swallow an order to stop.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    code = EXIT_BUG
    try:
        die_with_parent(parent)
        _begin_with_own_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except Unrecoverable as error:
        log.critical("%s: %s", name, error)
        code = EXIT_UNRECOVERABLE
    except BaseException:
        log.critical("%s ends", name, exc_info=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _begin_with_own_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C reaches the whole foreground group; the supervisor answers for all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def threads() -> int:
    """Return the number of threads of this process, those of C libraries too.

    It must be 1 before a fork, which copies only the calling thread.
    """
    # /proc/self/task has a folder for each thread, each of which adds a link to the count.
    return os.stat("/proc/self/task").st_nlink - 2


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which forked it, ends in any way."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    # The parent may have ended before the call: then the kernel never sends the signal.
    if os.getppid() != parent:
        os._exit(1)
