"""A node's share in the program of the loopback, in a process that can be killed: `joiner.py HOST PORT`.

Says "joined SLOT" when it is steered, and leaves in order when its standard input ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ebpf.interfaces import interfaces_of
from ebpf.layout import NodePlan
from ebpf.loader import join


def main(host: str, port: int) -> None:
    plan = NodePlan(
        host=host, shared_port=port, own_ports=(port + 1,), gossip_port=port + 100, shard_cpus=(0,)
    )
    membership = join(interfaces_of(host)[0], plan, pid=os.getpid())
    print("joined", membership.slot, flush=True)
    sys.stdin.read()
    membership.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
