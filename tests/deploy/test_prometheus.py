"""The alerts and the dashboard: each name that they query exists, each alert fires, and none of a well node.

What promtool says is left out where it is not installed (`apt-get install prometheus`, or `make promtool`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laminar.node.api.metrics import names
from laminar.testing.nodes import serve

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
RULE_TESTS = ROOT / "deploy" / "prometheus" / "tests.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "laminar.json"

KNOWN = {sample: family for family in names.ALL for sample in names.samples(family)}
ADDED = {"le", "instance", "job"}
"""Labels that histograms and Prometheus add."""


def rules() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    groups = msgspec.yaml.decode(ALERTS.read_bytes())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def queries() -> dict[str, str]:
    """All queries, by the alert or panel that has them."""
    found = {name: rule["expr"] for name, rule in rules().items()}
    for panel in msgspec.json.decode(DASHBOARD.read_bytes())["panels"]:
        for number, target in enumerate(panel.get("targets", ())):
            found[f"{panel['title']} {number}"] = (
                target["expr"]
                .replace("$__rate_interval", "5m")
                .replace("$instance", ".*")
                .replace("$topic", ".*")
            )
    return found


@pytest.fixture(scope="module")
def promtool() -> Callable[..., str]:
    """Runs promtool; returns what it says."""
    program = shutil.which("promtool")
    if program is None:
        assert os.environ.get("REQUIRE") != "promtool", "REQUIRE=promtool, and it is not installed"
        pytest.skip("promtool is not installed: `make promtool`")

    def run(*words: str | Path, said: str = "") -> str:
        ran = subprocess.run(
            [program, *map(str, words)], input=said, capture_output=True, text=True, timeout=180, check=False
        )
        assert 0 == ran.returncode, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    return run


@pytest.mark.parametrize("query", queries().values(), ids=queries().keys())
def test_a_query_names_only_what_is_there(query: str) -> None:
    """Metrics of the table, and labels that they have; a counter only as a rate, or above zero."""
    shown = set(re.findall(r"\blaminar_\w+", query))
    assert shown <= KNOWN.keys()
    labels = {label for name in shown for label in KNOWN[name].labels} | ADDED
    for inside in re.findall(r"\{([^}]*)\}", query):
        assert {each.split("=")[0].strip(" ~!") for each in inside.split(",")} <= labels, inside
    for grouped in re.findall(r"(?:by|on) \(([^)]*)\)", query):
        assert {each.strip() for each in grouped.split(",")} <= labels, grouped
    for name in shown:
        if KNOWN[name].kind == "counter" and name != "laminar_raft_second_leaders_total":
            assert re.search(rf"(rate|increase)\({name}\b", query), name


def test_each_alert_has_a_row_for_operators_and_a_test() -> None:
    """None is missing, and no row or test is of an alert that is gone."""
    page = (ROOT / "docs" / "operating.md").read_text()
    rows = re.findall(r"^\| `(Laminar\w+)` \| (critical|warning) \|", page, re.MULTILINE)
    tested = [test["name"] for test in msgspec.yaml.decode(RULE_TESTS.read_bytes())["tests"]]

    assert rows == [(name, rule["labels"]["severity"]) for name, rule in rules().items()]
    assert tested == [*rules()]


def test_the_dashboard_can_be_imported() -> None:
    """Each panel has a place of its own, and takes the data source that is chosen."""
    board = msgspec.json.decode(DASHBOARD.read_bytes())
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]

    assert len(places) == len(set(places)) == len({panel["id"] for panel in board["panels"]})
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    assert {"${datasource}"} == {target["datasource"]["uid"] for target in targets}
    variables = {each["name"]: each.get("query") for each in board["templating"]["list"]}
    for query in (variables["instance"], variables["topic"]):
        assert re.search(r"\w+", query.partition("(")[2])[0] in KNOWN  # type: ignore[index]


def test_each_alert_fires_by_its_fault(promtool: Callable[..., str]) -> None:
    assert "SUCCESS" in promtool("check", "rules", ALERTS)
    assert "SUCCESS" in promtool("test", "rules", RULE_TESTS)


def test_a_node_that_is_well_makes_no_alert_fire_and_answers_each_query(
    promtool: Callable[..., str], tmp_path: Path
) -> None:
    """By its real series, an hour long; promtool finds nothing wrong with the text either."""
    with (
        serve(settings={"low_water_bytes": 1}) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        assert 201 == http.put("/v1/topics/t", json={"settings": {"retention_ms": 10**9}}).status_code
        for _ in range(3):
            assert 201 == http.post("/v1/topics/t/partitions/0/records", content=b"x").status_code
        assert 200 == http.get("/v1/topics/t/partitions/0/records").status_code
        assert http.put("/v1/topics/t/cursors/c", json={"positions": {"0": 3}}).status_code < 300
        text = http.get("/metrics").text
    series = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    labelled = [(_with_instance(name), value) for name, _, value in series]
    labelled.append(('up{job="laminar",instance="n1"}', "1"))
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": f"{value}x70"} for name, value in labelled],
                "alert_rule_test": [
                    {"alertname": name, "eval_time": "65m", "exp_alerts": []} for name in rules()
                ],
            }
        ],
    }
    file = tmp_path / "well.yml"
    file.write_text(json.dumps(tests))

    assert "SUCCESS" in promtool("test", "rules", file)
    shown = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    rare = {name for name in KNOWN if "staged" in name or "channel_" in name or "_tls_" in name}
    for query in queries().values():
        asked = set(re.findall(r"\blaminar_\w+", query)) - rare - {"laminar_transport_refused_total"}
        assert asked <= shown


def test_promtool_finds_the_metrics_well_formed(promtool: Callable[..., str]) -> None:
    """Its lints too: names, types, units, helps."""
    with serve() as url:
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text

    assert "" == promtool("check", "metrics", said=text)


def _with_instance(name: str) -> str:
    base, brace, labels = name.partition("{")
    return f'{base}{{instance="n1",{labels}' if brace else f'{base}{{instance="n1"}}'
