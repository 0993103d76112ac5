"""Deliberate bugs: each rule switched off in turn. `python -m tests.sim.mutants` asks who notices."""

from __future__ import annotations

from tests.sim.mutants.appends import APPENDS
from tests.sim.mutants.balance import BALANCE
from tests.sim.mutants.channels import CHANNELS
from tests.sim.mutants.consumers import CONSUMERS
from tests.sim.mutants.delayed import DELAYED
from tests.sim.mutants.lanes import LANE_RULES
from tests.sim.mutants.nodes import NODES
from tests.sim.mutants.placement import PLACEMENT
from tests.sim.mutants.protocol import PROTOCOL
from tests.sim.mutants.reclaim import RECLAIMS
from tests.sim.mutants.route_changes import ROUTE_CHANGES
from tests.sim.mutants.route_steps import ROUTE_STEPS
from tests.sim.mutants.routes import ROUTES
from tests.sim.mutants.tables import TABLES
from tests.sim.mutants.transactions import TRANSACTIONS

CASES = [
    *PROTOCOL,
    *TABLES,
    *TRANSACTIONS,
    *NODES,
    *PLACEMENT,
    *BALANCE,
    *ROUTES,
    *ROUTE_CHANGES,
    *ROUTE_STEPS,
    *APPENDS,
    *CONSUMERS,
    *RECLAIMS,
    *CHANNELS,
    *DELAYED,
    *LANE_RULES,
]
