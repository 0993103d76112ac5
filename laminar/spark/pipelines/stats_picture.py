"""The chart of `stats`: rates over time, sizes, partitions and keys, on one page.

It shows what is in a topic, and whether it is skewed. So the title names the skew, and a partition has one
colour in all panels: a frequent key, its partition, and the time of its records are seen together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.spark.pipelines.buckets import DAY_MS, WIDTHS_MS
from laminar.spark.pipelines.stats_values import Rates, Sizes, Stats
from laminar.spark.pipelines.units import instant, name, number, per, percent, short, size, utc, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of the partitions with most records; all others are grey.
COLORS = ("#3b6fb6", "#e08a3c", "#4f9d69", "#c8504f", "#8468a8", "#4aa5b5", "#c9a93a", "#b06a8f")
OTHERS = "#b8bec6"
INK, PALE = "#2b2f36", "#6b7280"
TOP_KEYS = 12
_HOT_KEY, _HOT_PERCENT, _UNEVEN = 0.1, 0.25, 1.5
_MOST_TICKS = 10
_UNIT = {"s": "second", "min": "minute", "h": "hour", "day": "day"}
_MOST_BARS_NAMED = 24


def draw(stats: Stats, path: Path) -> None:
    """Draw the chart to a file, whose suffix is the format: PNG, SVG or PDF. Needs matplotlib.

    Raises:
        OSError: when the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(stats).savefig(path)


def findings(stats: Stats) -> str:
    """Return the findings on skew, as text: keys or partitions with far more records than others."""
    if not stats.records:
        return "there are no records"
    found = []
    keys = stats.keys
    if keys.top and keys.top[0].share >= _HOT_KEY and keys.distinct > 1:
        found.append(f"key {name(keys.top[0].key)} has {percent(keys.top[0].share)} of the records")
    elif keys.top_percent_keys > 1 and (keys.top_percent_share or 0) >= _HOT_PERCENT:
        found.append(f"1 % of the keys have {percent(keys.top_percent_share or 0)} of the records")
    if (stats.largest_over_mean or 0) >= _UNEVEN:
        largest = max(stats.partitions, key=lambda each: each.records)
        found.append(f"partition {largest.partition} has {stats.largest_over_mean:.2f} times the mean")
    if keys.in_several_partitions:
        found.append(f"{number(keys.in_several_partitions)} keys are in several partitions")
    return ", ".join(found) or "neither keys nor partitions are skewed"


def colors_of(stats: Stats) -> dict[int, str]:
    """Return by partition the colour in which the picture draws it."""
    largest = sorted(stats.partitions, key=lambda each: (-each.records, each.partition))
    if len(largest) > len(COLORS):
        return {
            each.partition: COLORS[place] if place < len(COLORS) - 1 else OTHERS
            for place, each in enumerate(largest)
        }
    return {each.partition: color for each, color in zip(largest, COLORS, strict=False)}


def figure_of(stats: Stats) -> Figure:
    """Return the chart, not yet drawn. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 10.4), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    title = f"{name(stats.topic, 60)}: {findings(stats)}"
    _write(figure, 0.035, 0.945, title, fontsize=19 if len(title) < 95 else 15, weight="bold", color=INK)
    _write(figure, 0.035, 0.912, _totals(stats), fontsize=12, color=PALE)
    _write(figure, 0.035, 0.018, _caption(stats), fontsize=9.5, color=PALE)
    if stats.rates is None:
        _write(figure, 0.5, 0.5, "no records", fontsize=30, color=OTHERS, ha="center")
        return figure
    colors = colors_of(stats)
    over_time = figure.add_gridspec(
        2, 1, left=0.06, right=0.905, top=0.84, bottom=0.5, hspace=0.12, height_ratios=[2.6, 1]
    )
    records = figure.add_subplot(over_time[0])
    _rates(records, stats.rates, colors)
    _bytes(figure.add_subplot(over_time[1], sharex=records), stats.rates)
    below = figure.add_gridspec(
        1, 4, left=0.06, right=0.94, top=0.385, bottom=0.105, wspace=0.38, width_ratios=[1, 1, 0.8, 1]
    )
    sizes, partitions, top, ranks = (figure.add_subplot(below[place]) for place in range(4))
    _sizes(sizes, stats.values, stats.key_sizes)
    _partitions(partitions, stats, colors)
    _top_keys(top, stats, colors)
    _ranks(ranks, stats)
    return figure


def _totals(stats: Stats) -> str:
    if stats.first_ms is None or stats.last_ms is None:
        return f"{len(stats.partitions)} partitions"
    parts = [
        f"{stats.records:,} records in {len(stats.partitions)} partitions",
        f"{size(stats.bytes)} of keys and values",
        f"{instant(stats.first_ms)} to {instant(stats.last_ms)} UTC",
        f"{stats.keys.distinct:,} keys",
    ]
    if stats.keys.keyless_records:
        parts.append(f"{percent(stats.keys.keyless_records / stats.records)} of the records without a key")
    return "   ·   ".join(parts)


def _caption(stats: Stats) -> str:
    """Return notes on how to read the chart, and the figures that have no panel: large values and tags."""
    parts = ["Times are the producers' where given, else those of the append."]
    rates = stats.rates
    if rates is not None and rates.before + rates.after:
        parts.append(
            f"Rates leave out records whose times are far from all others: {rates.before:,} before,"
            f" {rates.after:,} after."
        )
    if stats.values.absent:
        parts.append(f"{stats.values.absent:,} large values are stored apart and not counted in bytes.")
    if stats.tags.top:
        shown = ", ".join(f"{name(each.tag)} {percent(each.share)}" for each in stats.tags.top[:5])
        more = stats.tags.distinct - len(stats.tags.top[:5])
        parts.append(f"Tags: {shown}{f', and {more:,} more' if more else ''}.")
    return " ".join(parts)


def _write(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    figure.text(x, y, text, parse_math=False, **style)


def _title(axes: Axes, text: str, below: str = "") -> None:
    """Write what the panel shows, in bold, and below it the main figures."""
    axes.set_title(text, loc="left", fontsize=12.5, color=INK, weight="bold", pad=26 if below else 10)
    axes.annotate(
        below,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=10,
        color=PALE,
        parse_math=False,
    )
    axes.tick_params(labelsize=9.5, colors=PALE)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#c9cdd3")


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=12, color=PALE)
    axes.set_xticks([])
    axes.set_yticks([])


# -- over time ---------------------------------------------------------------------------------


def _edges(rates: Rates) -> list[float]:
    """Return the edges of the buckets in seconds from the first edge: floats would round epoch times."""
    return [bucket * rates.width_ms / 1000 for bucket in range(rates.buckets + 1)]


def _rates(axes: Axes, rates: Rates, colors: dict[int, str]) -> None:
    """Draw stacked areas of the partitions, the largest at the bottom."""
    totals = rates.total("records")
    unit, seconds = per(max(totals) * 1000 / rates.width_ms)
    scale = seconds * 1000 / rates.width_ms
    order = sorted(rates.partitions, key=lambda each: (-sum(each.records), each.partition))
    named = [each for each in order if colors[each.partition] != OTHERS]
    grey = [each for each in order if colors[each.partition] == OTHERS]
    layers = [(f"partition {each.partition}", colors[each.partition], each.records) for each in named]
    if grey:
        together = [sum(column) for column in zip(*(each.records for each in grey), strict=True)]
        layers.append((f"{len(grey)} others", OTHERS, together))
    edges = _edges(rates)
    # There is one edge more than buckets: the last value is repeated for it.
    heights = [[count * scale for count in (*layer[2], layer[2][-1])] for layer in layers]
    axes.stackplot(
        edges,
        heights,
        step="post",
        colors=[layer[1] for layer in layers],
        labels=[layer[0] for layer in layers],
        linewidth=0,
    )
    figures = [f"steps of {width(rates.width_ms)}"]
    if rates.mean_per_s is not None:
        axes.axhline(rates.mean_per_s * seconds, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        figures.append(f"mean {number(rates.mean_per_s * seconds)}, the dashed line")
    if rates.peak_per_s is not None:
        figures.append(f"peak {number(rates.peak_per_s * seconds)} at {instant(rates.peak_ms)}")
    _title(axes, f"Records per {_UNIT[unit]}, by partition", " · ".join(figures))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(totals) * scale * 1.08)
    axes.yaxis.set_major_formatter(lambda value, place: number(value))
    axes.tick_params(labelbottom=False)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        reverse=True,
    )


def _bytes(axes: Axes, rates: Rates) -> None:
    totals = rates.total("bytes")
    unit, seconds = per(max(totals) * 1000 / rates.width_ms)
    scale = seconds * 1000 / rates.width_ms
    edges = _edges(rates)
    heights = [count * scale for count in (*totals, totals[-1])]
    axes.fill_between(edges, heights, step="post", color="#8e99a8", linewidth=0)
    _title(axes, "")
    axes.set_ylabel(f"bytes per {_UNIT[unit]}", fontsize=9.5, color=PALE)
    highest = max(*heights, 1)
    axes.set_ylim(0, highest * 1.1)
    # Two or three ticks, which are round in units of 1,024.
    step = 1 << max(0, math.floor(math.log2(highest)) - 1)
    axes.set_yticks([step * place for place in range(4) if step * place <= highest])
    axes.yaxis.set_major_formatter(lambda value, place: size(value))
    places, labels = time_ticks(rates.since_ms, rates.since_ms + rates.buckets * rates.width_ms)
    axes.set_xticks([(place - rates.since_ms) / 1000 for place in places], labels)


def time_ticks(since_ms: int, until_ms: int) -> tuple[list[int], list[str]]:
    """Return round times of a range and their labels, with a date only where it changes."""
    steps = (each for each in WIDTHS_MS if (until_ms - since_ms) // each < _MOST_TICKS)
    step = next(steps, -(-(until_ms - since_ms) // _MOST_TICKS))
    places = list(range(-(-since_ms // step) * step, until_ms + 1, step))
    labels = []
    before = ""
    for place in places:
        at = utc(place)
        if at is None:
            labels.append(f"{place} ms")
            continue
        if step >= DAY_MS:
            fine, coarse = at.strftime("%b %d"), at.strftime("%Y")
        else:
            seconds = at.strftime(":%S") if step < 60_000 else ""
            tenths = f".{at.microsecond // 100_000}" if step < 1_000 else ""
            fine, coarse = at.strftime("%H:%M") + seconds + tenths, at.strftime("%Y-%m-%d")
        labels.append(f"{fine}\n{coarse}" if coarse != before else fine)
        before = coarse
    return places, labels


# -- sizes, partitions, keys -------------------------------------------------------------------


def _sizes(axes: Axes, values: Sizes, keys: Sizes) -> None:
    """Draw values by powers of two. Keys are usually short: their median is in the subtitle."""
    of_keys = "" if keys.p50 is None else f"median of keys {size(keys.p50)}"
    if not values.count:
        _title(axes, "Sizes of values", of_keys)
        _empty(axes, "all values are stored apart" if values.absent else "no values")
        return
    assert values.p50 is not None and values.p99 is not None and values.max is not None
    mean = f"mean {size(values.mean or 0)}, max {size(values.max)}"
    _title(axes, "Sizes of values", " · ".join(filter(None, (mean, of_keys))))
    lefts = [_power(each.low) for each in values.histogram]
    heights = [each.count / values.count * 100 for each in values.histogram]
    axes.bar(lefts, heights, width=0.94, align="edge", color="#7fa3d1")
    top = max(heights) * 1.25
    for word, at, height, align in (
        ("median", values.p50, 0.93, "right"),
        ("p99", values.p99, 0.85, "right"),
    ):
        axes.plot([_power(at)] * 2, [0, top * height], color=INK, linewidth=1, linestyle=(0, (3, 2)))
        axes.annotate(
            f"{word} {size(at)} ",
            (_power(at), top * height),
            ha=align,
            fontsize=9.5,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
        )
    # A narrow range is not stretched, which leaves room for the labels to the left.
    high = _power(values.histogram[-1].high)
    low = min(lefts[0] - 0.5, high - 8)
    axes.set_xlim(low, high + 0.5)
    axes.set_ylim(0, top)
    axes.set_yticks([place for place in axes.get_yticks() if place <= min(top, 100)])
    step = 1 if high - low <= 6 else 2 if high - low <= 14 else 4
    places = [place for place in range(round(high) + 1) if place % step == 0]
    axes.set_xticks(places, [size(1 << place) for place in places], rotation=35, ha="right")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g} %")
    axes.set_ylabel("of the records", fontsize=9.5, color=PALE)


def _power(count: float) -> float:
    """Return a size's position on the axis, its binary logarithm; -1 for 0 bytes."""
    return math.log2(count) if count else -1.0


def _partitions(axes: Axes, stats: Stats, colors: dict[int, str]) -> None:
    """Draw shares of the records as bars, of the bytes as dots, and the mean as a line."""
    loads = stats.partitions
    _title(axes, "Records by partition", f"the largest has {stats.largest_over_mean or 0:.2f} times the mean")
    places = range(len(loads))
    axes.bar(
        places,
        [each.share * 100 for each in loads],
        width=0.82,
        color=[colors[each.partition] for each in loads],
    )
    if stats.bytes:
        axes.plot(
            places,
            [each.bytes / stats.bytes * 100 for each in loads],
            "D",
            markersize=4.5 if len(loads) <= _MOST_BARS_NAMED else 2,
            color=INK,
            markerfacecolor="white",
            label="of the bytes",
        )
    axes.axhline(100 / len(loads), color=INK, linewidth=1, linestyle=(0, (4, 3)), label="mean")
    if len(loads) <= _MOST_BARS_NAMED:
        axes.set_xticks(places, [str(each.partition) for each in loads])
    axes.set_xlabel("partition", fontsize=9.5, color=PALE)
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g} %")
    axes.set_ylabel("of the records", fontsize=9.5, color=PALE)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    axes.legend(loc="upper right", ncols=2, frameon=False, fontsize=9, labelcolor=INK, columnspacing=1)


def _top_keys(axes: Axes, stats: Stats, colors: dict[int, str]) -> None:
    _title(axes, "Most frequent keys", "in the colour of their partition")
    top = stats.keys.top[:TOP_KEYS]
    if not top:
        _empty(axes, "no record has a key")
        return
    shares = [each.share * 100 for each in top]
    bars = axes.barh(
        range(len(top)),
        shares,
        height=0.78,
        color=[OTHERS if each.partition is None else colors[each.partition] for each in top],
    )
    axes.bar_label(bars, [percent(each.share) for each in top], padding=3, fontsize=9, color=INK)
    axes.set_yticks(range(len(top)), [name(each.key, 16) for each in top], parse_math=False)
    axes.set_ylim(max(len(top), 6) - 0.5, -0.5)
    axes.set_xlim(0, max(shares) * 1.25)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def _ranks(axes: Axes, stats: Stats) -> None:
    """Draw records by rank of the key on logarithmic axes, where Zipf's law is a straight line."""
    keys = stats.keys
    many = f"the top 1 %, {number(keys.top_percent_keys)} of {number(keys.distinct)}, have"
    below = f"{many} {percent(keys.top_percent_share)} of the records" if keys.top_percent_share else ""
    _title(axes, "Keys by rank", below)
    if not keys.ranks:
        _empty(axes, "no record has a key")
        return
    counts = {each.rank: each.records for each in keys.ranks}
    counts |= {place: each.records for place, each in enumerate(keys.top, start=1)}
    ranks = sorted(counts)
    axes.loglog(ranks, [counts[rank] for rank in ranks], "-o", color=COLORS[0], markersize=3.5, linewidth=1.6)
    axes.set_xlabel("rank of the key", fontsize=9.5, color=PALE)
    axes.set_ylabel("its records", fontsize=9.5, color=COLORS[0])
    axes.set_xlim(0.8, max(10, keys.distinct) * 1.25)
    axes.set_ylim(0.7, max(counts.values()) * 2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, place: short(value))
        axis.set_minor_formatter(lambda value, place: "")
    together = axes.twinx()
    together.plot(
        [each.rank for each in keys.ranks],
        [each.share * 100 for each in keys.ranks],
        color=COLORS[1],
        linewidth=1.6,
        linestyle=(0, (4, 2)),
    )
    together.set_ylim(0, 105)
    together.set_ylabel("cumulative share of the records", fontsize=9.5, color=COLORS[1])
    together.yaxis.set_major_formatter(lambda value, place: f"{value:g} %")
    together.tick_params(labelsize=9.5, colors=PALE)
    for spine in together.spines.values():
        spine.set_visible(False)
    share = (keys.top_percent_share or 0) * 100
    together.plot([keys.top_percent_keys], [share], "o", color=COLORS[1], markersize=6)
