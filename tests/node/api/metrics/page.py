"""Writes docs/metrics.md from the table of metrics: `python -m tests.node.api.metrics.page`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from laminar.node.api.metrics import names
from laminar.node.api.metrics.names import Family

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

`GET /metrics` of any shard has the numbers of all processes of its node, in Prometheus' text format, or as
OpenMetrics where `Accept` asks for it. With tokens it needs the role `metrics`. This page is written from
`laminar/node/api/metrics/names.py`.

- There are sums by topic, none by partition. The numbers of one topic's partitions are at
  `/metrics?detail=partitions&topic=TOPIC`.
- A counter begins at 0 with its process, and `rate()` handles that. One of a topic, a consumer or a channel
  counts what happened while a replica was on this node, or led here: add up nodes with `sum by (topic)`.
- A request's duration is from its last byte to the answer, less the wait that the client asked for
  (`wait_ms`), as it is not known how much of that was needed: a fetch that waits is 0 s long or longer.
- Lag comes from the nodes that lead: `sum by (topic, consumer) (laminar_consumer_lag_records)`. A partition
  in which a consumer has no position counts as unread. The age of what is unread is an upper bound, by the
  index in memory.
- A node has series for 5,000 consumers, those that it has known longest; `laminar_series_left_out` counts the
  others.
- A scrape that takes more than 50 ms of the CPU is answered again, unchanged, for twenty times as long, 5 s
  at most. It holds an event loop for no more than about 5 ms at a time.
- Measured (`python -m benches.http.bench_metrics`): a scrape of a node with 10,000 partitions in 100 topics
  takes 86 ms of the CPU, of all its processes together, while they are idle, some 31 ms of it for each 5,000
  of a shard; 120 ms if all have been appended to since the last one. It has 90 KB. The text of 10,000 topics
  and 5,000 consumers takes 40 ms, and has 5 MB.
- To observe a value in a histogram takes less than 200 ns, to note a request less than 400 ns. That is less
  than 2 % of the smallest append, and of a batch nothing that can be measured.
- [Alerts](operating.md#alerts) and a dashboard for Grafana are in `deploy/`.
"""


def section(title: str, families: Iterable[Family]) -> str:
    rows = [
        f"| `{family.sample}` | {family.kind} | {', '.join(family.labels)} | {family.help} |"
        for family in families
    ]
    return (
        "\n".join([f"## {title}\n", "| name | type | labels | |", "| --- | --- | --- | --- |", *rows]) + "\n"
    )


def page() -> str:
    """The whole page."""
    grouped = {*names.OF_TOPICS, *names.OF_CONSUMERS, *names.OF_CHANNELS, *names.OF_CHANNEL_COUNTS}
    grouped |= set(names.OF_PARTITIONS)
    parts = [
        INTRODUCTION,
        section("The node", (family for family in names.OTHERS if family not in grouped)),
        section("Topics", names.OF_TOPICS),
        section("Consumers", names.OF_CONSUMERS),
        section("Channels", (*names.OF_CHANNELS, *names.OF_CHANNEL_COUNTS)),
        section("Partitions of one topic", names.OF_PARTITIONS),
    ]
    by_part: dict[str, list[Family]] = {}
    for (part, _), family in names.OF_PROCESSES.items():
        by_part.setdefault(part, []).append(family)
    parts += [section(f"Processes: {part}", families) for part, families in by_part.items()]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
