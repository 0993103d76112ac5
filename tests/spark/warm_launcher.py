"""What Spark starts in place of a Python: asks `warm_python.py` for a process, and ends as that does.

``warm_launcher.py SOCKET -m MODULE ARGUMENT...``. It loads nothing but what it needs, as it is started often.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Wait for the process. It dies with us, as only we hold the other end of its lifeline."""
    address, *arguments = sys.argv[1:]
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    lifeline, _end = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, lifeline])
        os.close(lifeline)
        # Spark closes these to say something to the process, which has them now.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        told = server.recv(16)
    code = int(told or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
