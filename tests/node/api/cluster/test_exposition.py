"""The text of metrics, read back by Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from laminar.node.api.cluster.exposition import Family, Kind, exposition


def test_what_is_written_is_read_back() -> None:
    """Two families, their samples in the order in which they were added."""
    full = Family("laminar_disk_bytes", "How full the disk is", Kind.GAUGE, ["process"])
    full.add(["shard 0"], 1.5)
    full.add(["shard 1"], 10**15)
    sent = Family("laminar_sent_total", "What was sent", Kind.COUNTER, ["topic", "partition"])
    sent.add(["flights", "3"], 7)

    gauge, counter = text_string_to_metric_families(exposition([full, sent]).decode())

    assert ("laminar_disk_bytes", "How full the disk is", "gauge") == (
        gauge.name,
        gauge.documentation,
        gauge.type,
    )
    assert [({"process": "shard 0"}, 1.5), ({"process": "shard 1"}, 10**15)] == [
        (sample.labels, sample.value) for sample in gauge.samples
    ]
    assert "counter" == counter.type
    assert [("laminar_sent_total", {"topic": "flights", "partition": "3"}, 7)] == [
        (sample.name, sample.labels, sample.value) for sample in counter.samples
    ]


@pytest.mark.parametrize("text", ['a"b', r"a\b", "a\nb", r"a\nb", 'a\\"', "ü"])
def test_a_text_with_the_formats_own_marks_stays_what_it_is(text: str) -> None:
    """In a label's value and in a family's description."""
    family = Family("laminar_x", f"x{text}", Kind.GAUGE, ["name"])
    family.add([text], 1)

    (found,) = text_string_to_metric_families(exposition([family]).decode())

    assert (f"x{text}", text) == (found.documentation, found.samples[0].labels["name"])


def test_a_sample_has_a_value_for_each_label() -> None:
    """A sample without one would be another series."""
    family = Family("laminar_x", "x", Kind.GAUGE, ["topic", "partition"])

    with pytest.raises(ValueError, match="shorter"):
        family.add(["flights"], 1)
