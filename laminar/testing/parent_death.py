"""Ties a process group to the life of the process that holds the other end of a pipe.

Run as ``python parent_death.py FD COMMAND...`` in a process group of its own: it asks the kernel to send
SIGKILL to the group when the last writer of pipe `FD` is gone, and becomes COMMAND. The kernel keeps the
promise by itself, so no thread waits for it, it holds for all descendants that stay in the group, and a
``kill -9`` of the starter does not escape it. The promise belongs to the pipe: each group has its own.
``PR_SET_PDEATHSIG`` would be shorter, but it fires when the *thread* that started the process ends, and knows
only the one process. Linux only, like the server.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys


def tie(fd: int) -> None:
    """Let this process group die with the last writer of the pipe `fd`."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    # It may have gone before we asked, and then no signal comes.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Tie this process, then become the command; the pipe stays open through it."""
    assert os.getpgrp() == os.getpid(), "a tethered process leads a group of its own"
    fd, *command = arguments
    tie(int(fd))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
