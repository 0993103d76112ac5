"""Time limits of the client, the node and the leader: each is longer than the waits that it includes.

A client sends an append to a shard, which forwards it to the partition's leader, which waits for a majority.
Each of the three answers with what it knows when its own time limit is over. The process that sent the
request must still be waiting then: otherwise the client would only see that no answer came, although the
leader could say that the outcome is unknown.

    client's attempt > forwarding of an append > wait for a majority + how often that is checked

All durations are in seconds. Those of client and node that depend on each other are defined only here, and
`tests/http/api/test_deadlines.py` checks what must hold between them.
"""

from __future__ import annotations

# -- the leader ------------------------------------------------------------------------------

COMMIT_WAIT_S = 8.0
"""An append that no majority has confirmed for so long is answered 504 `outcome_unknown`."""

COMMIT_CHECK_S = 0.5
"""How often that is checked, for all appends of a shard in one pass."""

# -- between shards --------------------------------------------------------------------------

TRANSFER_S = 0.5
"""Allowance for a request and its answer between two shards."""

FORWARDED_APPEND_S = COMMIT_WAIT_S + COMMIT_CHECK_S + TRANSFER_S
"""One forwarding of an append to the leader."""

FORWARDED_READ_S = 5.0
"""One forwarding of a read, beside what the client lets it wait for records (`wait_ms`)."""

FORWARDED_STEP_S = 5.0
"""One step on a cursor or a group at its leader."""

GATE_S = 3.0
"""At most so long a claim of a cursor waits for the leaders of the partitions before; then it is undone."""

FORWARDED_GATE_S = 1.0
"""One of these questions, at the leader."""

FORWARDED_SINK_STEP_S = 30.0
"""One step of a transaction at its leader, which may itself ask several partitions."""

# -- finding the leader ----------------------------------------------------------------------

ASK_WHO_LEADS_S = 0.5
"""One question to a replica who leads."""

ELECTION_WAIT_S = 2.5
"""How long a request waits until some leader is known; several election timeouts."""

SECOND_HOP_WAIT_S = 1.0
"""The same at a replica that was asked by another shard, which waits as well."""

STILL_LEADS_CHECK_S = 0.5
"""How often it is checked that a leader that does not answer has not been replaced."""

LOOK_UP_PAUSE_S = 0.02
"""Longest pause between two looks for a leader, and between two attempts of a request of a client."""

FIRST_LOOK_UP_PAUSE_S = 0.002
"""The first of these pauses; each is twice the one before. A hand-over takes as long as a few appends."""

STEP_PAUSE_S = 0.05
"""The same for steps of cursors, groups and transactions."""

# -- attempts: no new one begins after so long ---------------------------------------------------

APPEND_ATTEMPTS_S = 5.0
ROUTE_WAIT_S = 5.0
"""How long an append to a topic waits for a route that takes its records."""

READ_ATTEMPTS_S = 5.0
STEP_ATTEMPTS_S = 10.0
GATE_ATTEMPTS_S = 1.0

# -- the client ------------------------------------------------------------------------------

CLIENT_ATTEMPT_S = FORWARDED_APPEND_S + 2 * TRANSFER_S
"""One attempt of a client at one node; then it asks another."""

CLIENT_LEADER_WAIT_S = 5.0
"""After this time without a leader a request for a first or end offset goes to the replicas."""

CLIENT_TOTAL_S = 30.0
"""All attempts of a request, unless the program says otherwise."""
