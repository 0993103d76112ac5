"""The table of metrics: names by the rules of Prometheus, each once, and on the page as in the table."""

from __future__ import annotations

import re

from laminar.node.api.metrics import names
from tests.node.api.metrics.page import PAGE, page

# Names with the prefix of metrics that are none of a node: a fixture of pytest, metrics of a Spark query.
_NO_METRICS = {"laminar_client", "laminar_spark_lag_records", "laminar_spark_offset"}


def test_each_name_is_there_once_and_by_the_rules() -> None:
    """Snake case, in base units, without the suffixes that the formats add."""
    shown = [sample for family in names.ALL for sample in names.samples(family)]

    assert len(shown) == len(set(shown))
    for family in names.ALL:
        assert re.fullmatch(r"laminar_[a-z][a-z0-9_]*", family.name), family
        assert not re.search(r"_(total|count|sum|bucket|ms|us|s|milliseconds|kib|mib)$", family.name), family
        assert family.help and not family.help.endswith("."), family
        if family.kind in ("histogram", "summary"):
            assert "seconds" == family.unit, family


def test_what_is_not_shown_is_not_shown() -> None:
    assert not names.NOT_SHOWN.keys() & names.OF_PROCESSES.keys()


def test_the_page_is_written_from_the_table() -> None:
    """`python -m tests.node.api.metrics.page` writes it."""
    assert page() == PAGE.read_text()


def test_metrics_that_a_page_names_are_in_the_table() -> None:
    """In full; of a histogram with the suffix of a sample, too."""
    table = set(re.findall(r"`(laminar_[a-z0-9_]+)`", PAGE.read_text()))
    others = sorted(page for page in PAGE.parent.glob("*.md") if page != PAGE)
    named = {name for each in others for name in re.findall(r"laminar_[a-z0-9_]+", each.read_text())}
    cut = [each.name for each in others if re.search(r"`\.\.\._", each.read_text())]

    assert set() == {re.sub(r"_(count|sum|bucket)$", "", name) for name in named} - table - _NO_METRICS
    assert [] == cut
