"""A wrapper around a command: it and its process group are killed when the starting process ends.

Run as ``python parent_death.py FD COMMAND...`` in a process group of its own. It asks the kernel to send
SIGKILL to the group when the last writer of the pipe `FD` is gone, and then executes COMMAND in its place.
The starter holds the only write end, so this also works after a ``kill -9`` of the starter, for all
descendants that stay in the group, and without a waiting thread. The request is a property of the pipe, so
each group needs a pipe of its own. ``PR_SET_PDEATHSIG`` would be shorter, but its signal is sent when the
*thread* that started the process ends, and to that one process only. Linux only, like the server.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys


def tie(fd: int) -> None:
    """Ask the kernel to kill this process group when the pipe `fd` has no writer any more."""
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    # If the last writer was gone before the request, no signal comes: check that here.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Call `tie`, then replace this process by the command; the pipe stays open in it."""
    assert os.getpgrp() == os.getpid(), "a tied process leads a group of its own"
    fd, *command = arguments
    tie(int(fd))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
