"""`laminar pipeline stats`: what `laminar.spark.pipelines.stats` finds, as tables, JSON or a picture."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.commands.pipeline import HERE, Spark, Topic, options_of
from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster

if TYPE_CHECKING:
    from laminar.spark.pipelines.stats_values import Rates, Sizes, Stats

SHOWN = 10
# Characters of eight heights for bars, and the number of bars in a line.
BLOCKS = "▁▂▃▄▅▆▇█"
LINE = 60


def stats(
    topic: Topic,
    *,
    plot: Annotated[Path | None, Parameter(help="Draw it to this file: .png, .svg or .pdf.")] = None,
    top: Annotated[int, Parameter(help="How many of the most frequent keys and tags to show.")] = 20,
    json: Annotated[bool, Parameter(negative="", help="All that was found, as one JSON object.")] = False,
    spark: Spark = HERE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Show what is in a topic: rates over time, sizes, keys, partitions, tags, and how even they are."""
    from laminar.cli.output import show_json

    if top < 1:
        raise UsageError(f"--top is at least 1, not {top}")
    if plot is not None:
        _can_draw(plot)
    with spark.session("stats") as running:
        from laminar.spark.pipelines import stats as job

        found = job.stats(running, options_of(cluster), topic, top=top)
    if plot is not None:
        from laminar.spark.pipelines.stats_picture import draw

        draw(found, plot)
        complain(f"drawn to {plot}")
    if json:
        show_json(found)
    else:
        _show(found)


def _can_draw(plot: Path) -> None:
    """Refuse a picture that cannot be drawn, before Spark reads a topic for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Failed("--plot needs matplotlib, which is not installed (pip install 'laminar-mq[demo]')")
    if plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot is a file that ends in .png, .svg or .pdf, not {plot}")
    if plot.is_dir():
        raise UsageError(f"--plot is a file, and {plot} is a folder")
    plot.parent.mkdir(parents=True, exist_ok=True)


def _show(found: Stats) -> None:
    from laminar.cli.output import show
    from laminar.spark.pipelines.units import instant, name, percent, size

    def table(rows: list[dict[str, Any]]) -> None:
        if rows:
            print()
            show(rows, AS_TABLE, columns=tuple(rows[0]), name="")

    show(facts(found), AS_TABLE, columns=("what", "is"), name="what")
    table(
        [
            {
                "partition": each.partition,
                "records": each.records,
                "share": percent(each.share),
                "bytes": size(each.bytes),
                "first": None if each.first_ms is None else instant(each.first_ms),
                "last": None if each.last_ms is None else instant(each.last_ms),
            }
            for each in found.partitions
        ]
    )
    table(
        [
            {
                "key": name(each.key, 40),
                "records": each.records,
                "share": percent(each.share),
                "bytes": size(each.bytes),
                "partition": "several" if each.partition is None else each.partition,
            }
            for each in found.keys.top[:SHOWN]
        ]
    )
    table(
        [
            {"tag": name(each.tag, 40), "records": each.records, "share": percent(each.share)}
            for each in found.tags.top[:SHOWN]
        ]
    )


def facts(found: Stats) -> list[dict[str, Any]]:
    """Return the whole topic in a few lines, as rows of words."""
    from laminar.spark.pipelines.units import instant, percent, size

    rows = [("records", f"{found.records:,}"), ("bytes", f"{size(found.bytes)} of keys and values")]
    if found.first_ms is not None and found.last_ms is not None:
        rows.append(("times", f"{instant(found.first_ms)} to {instant(found.last_ms)} UTC"))
    if found.rates is not None:
        rows += _over_time(found.rates)
    rows.append(("values", sizes(found.values, "stored apart")))
    rows.append(("key sizes", sizes(found.key_sizes, "without a key")))
    keys = found.keys
    said = [f"{keys.distinct:,}"]
    if keys.top_percent_share is not None:
        share = percent(keys.top_percent_share)
        said.append(f"the top 1 % ({keys.top_percent_keys:,}) have {share} of the records")
    if keys.in_several_partitions:
        said.append(f"{keys.in_several_partitions:,} are in several partitions")
    rows.append(("keys", ", ".join(said)))
    partitions = f"{len(found.partitions)}"
    if found.largest_over_mean is not None:
        partitions += f", the largest has {found.largest_over_mean:.2f} times the mean"
    rows.append(("partitions", partitions))
    if found.tags.distinct:
        without = f", {found.tags.untagged_records:,} records without" if found.tags.untagged_records else ""
        rows.append(("tags", f"{found.tags.distinct:,}{without}"))
    return [{"what": what, "is": words} for what, words in rows]


def _over_time(rates: Rates) -> list[tuple[str, str]]:
    from laminar.spark.pipelines.units import instant, per, rate, size, width

    rows = []
    if rates.mean_per_s is not None and rates.peak_per_s is not None:
        unit, seconds = per(rates.mean_bytes_per_s or 0)
        mean_bytes = f"{size((rates.mean_bytes_per_s or 0) * seconds)}/{unit}"
        peak = f"{rate(rates.peak_per_s)} at {instant(rates.peak_ms)}"
        rows.append(("rate", f"mean {rate(rates.mean_per_s)} and {mean_bytes}, peak {peak}"))
    counts = rates.total("records")
    wide = -(-len(counts) // LINE)
    if (sys.stdout.encoding or "").lower().startswith("utf"):
        rows.append((f"in {width(rates.width_ms * wide)}", line(counts, wide)))
    if rates.before or rates.after:
        rows.append(("far off", f"{rates.before:,} records before these times, {rates.after:,} after"))
    return rows


def line(counts: list[int], wide: int) -> str:
    """Return sums of `wide` buckets each as heights; a space where there is nothing."""
    sums = [sum(counts[first : first + wide]) for first in range(0, len(counts), wide)]
    highest = max(sums)
    return "".join(BLOCKS[(each * len(BLOCKS) - 1) // highest] if each else " " for each in sums)


def sizes(found: Sizes, absent: str) -> str:
    """Return the distribution of sizes, in words."""
    from laminar.spark.pipelines.units import size

    words = []
    if found.mean is not None:
        named = (("min", found.min), ("median", found.p50), ("p90", found.p90), ("p99", found.p99))
        words = [f"{size(found.total)}, mean {size(found.mean)}"]
        words += [f"{name} {size(at)}" for name, at in (*named, ("max", found.max)) if at is not None]
    if found.absent:
        words.append(f"{found.absent:,} {absent}")
    return ", ".join(words) or "none"
