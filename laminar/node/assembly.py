"""The assembly of a node's processes: a shard with its HTTP API, and the controller.

This is the only module that knows both the shard and the HTTP routes that it serves. The supervisor runs
these functions in its children, by `entry_points`; `laminar.embedded` and the simulator call them in an event
loop of their own.
"""

from __future__ import annotations

from laminar.log.storage import Storage
from laminar.node.api.app import Api
from laminar.node.catalog.controller import Controller
from laminar.node.runtime.boot import CONTROLLER, Boot
from laminar.node.runtime.process import Process, run_process
from laminar.node.shard.shard import Shard, store_of


def make_shard(boot: Boot, storage: Storage) -> Shard:
    """Return a shard that serves the HTTP API. Call it inside the loop that it is to live in."""
    return Shard(boot, storage=storage, make_application=Api)


def make_process(boot: Boot, storage: Storage) -> Process:
    """Return the controller or shard that `boot` is for. Call it inside the loop that it is to live in."""
    return Controller(boot, storage=storage) if boot.role == CONTROLLER else make_shard(boot, storage)


def run_shard(boot: Boot) -> int:
    """Run a shard as this process until it ends; return the exit code."""
    return run_process(boot, store_of(boot), make_shard)
