"""A node as `python -m laminar.node` starts one, on loops of `benches.common.timed_loop`."""

from __future__ import annotations

import sys

import uvloop

from benches.common.timed_loop import TimedLoop
from laminar.node.__main__ import main

if __name__ == "__main__":
    uvloop.new_event_loop = TimedLoop
    sys.exit(main(sys.argv[1:]))
