"""Short versions of `make cluster-faults`: every kind of run for some seconds, every fault that fits."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.checkers import Fault, History, Operation, check_operations
from tests.checkers.timeline import write_timeline
from tests.cluster.faults import wires
from tests.cluster.faults.channels import run_channels
from tests.cluster.faults.groups import run_groups
from tests.cluster.faults.profiles import run_profile
from tests.cluster.faults.rounds import ROUNDS, run_rounds
from tests.cluster.faults.transactions import run_transactions


def sound(run: bool, told: pytest.CaptureFixture[str]) -> None:
    """The run's own report is the message."""
    assert run, told.readouterr().out


def test_consumers_of_channels_that_die_lose_nothing_and_get_nothing_that_is_done(
    real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaders are killed meanwhile; what `make cluster-faults WORKLOAD=channels` does for minutes."""
    run = run_channels("kills", real_disk, minutes=0.1, nodes=3, shards=1, seed=1, appends_per_s=60.0)
    sound(asyncio.run(run), capsys)


@pytest.mark.parametrize("kind", sorted(ROUNDS))
def test_a_few_rounds_lose_nothing(kind: str, real_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Power gone at all nodes; at one, with `interval`; bits that turn over; cuts while replicas move."""
    if ROUNDS[kind].cuttable and not wires.can_be_made():
        pytest.skip("no network namespaces: not root, or no command ip")
    sound(asyncio.run(run_rounds(kind, real_disk, count=1, seed=1)), capsys)


def test_faults_under_load_lose_double_and_reorder_nothing(
    real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of each that is short; the rest comes with `make cluster-faults`. Cuts only as root."""
    faults = ["kill leader", "kill shard", "disk full", "clock step"]
    if wires.can_be_made():
        faults.append("cut one")
    run = run_profile(
        "each", real_disk, minutes=0, nodes=3, shards=1, seed=1, appends_per_s=200.0, only=faults
    )
    sound(asyncio.run(run), capsys)

    history = History.load(real_disk / "history.jsonl")
    assert set(faults) == {each.what for each in history.faults}
    assert 200 <= sum(each.kind == "append" and each.outcome == "ok" for each in history.operations)


def test_members_of_a_group_that_die_lose_nothing_and_double_nothing_committed(
    real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaders are killed meanwhile; what `make cluster-faults WORKLOAD=groups` does for minutes."""
    run = run_groups("kills", real_disk, minutes=0.1, nodes=3, shards=1, seed=1, appends_per_s=100.0)
    sound(asyncio.run(run), capsys)


def test_drivers_that_crash_tear_double_and_reorder_no_transaction(
    real_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaders are killed meanwhile; what `make cluster-faults WORKLOAD=transactions` does for minutes."""
    run = run_transactions("kills", real_disk, minutes=0.1, nodes=3, shards=1, seed=1, appends_per_s=60.0)
    sound(asyncio.run(run), capsys)


def test_the_timeline_of_a_history_needs_nothing_but_itself(tmp_path: Path) -> None:
    """What was done, seen and wrong is in the page; it fetches nothing, and no value can end its script."""
    history = History()
    history.add(Fault(what="kill one", nodes=["node-2"], start_us=10, end_us=30))
    history.add(
        Operation(
            kind="append",
            process="w1",
            topic="t",
            partition=0,
            key="</script>",
            number=1,
            offset=0,
            start_us=12,
            end_us=20,
        )
    )
    history.add(Operation(kind="final", process="final", topic="t", partition=0, start_us=40, end_us=41))
    lost = check_operations(history.operations)

    write_timeline(tmp_path / "timeline.html", history, lost)

    page = (tmp_path / "timeline.html").read_text("utf-8")
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert ["lost"] == [each.kind for each in lost]
    assert [("kill one", ["node-2"])] == [(each["what"], each["nodes"]) for each in data["faults"]]
    assert [True, False] == [each["wrong"] for each in data["operations"]]
    assert [(str(lost[0]), "t/0")] == [(each["text"], each["place"]) for each in data["violations"]]
    assert not re.search(r"https?:|<link|src=", page.replace(json.dumps(data), ""))
