"""The picture: mean delay at the busiest airports, month by month, and how many flights there were.

The picture shows where and when flights were late, and on how many flights each figure is based: each cell
has its mean and its number of flights. The airports are sorted by their mean over all months.
"""

from __future__ import annotations

import calendar
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.flights import Delay, Delays

AIRPORTS = 24
SOURCE = "Data: US Bureau of Transportation Statistics, on-time performance 2001 (sample), public domain."

# The busiest airports of 2001. Any other airport is shown by its code.
CITIES = {
    "ATL": "Atlanta",
    "AUS": "Austin",
    "BNA": "Nashville",
    "BOS": "Boston",
    "BWI": "Baltimore",
    "CLE": "Cleveland",
    "CLT": "Charlotte",
    "CVG": "Cincinnati",
    "DCA": "Washington",
    "DEN": "Denver",
    "DFW": "Dallas",
    "DTW": "Detroit",
    "EWR": "Newark",
    "FLL": "Ft Lauderdale",
    "IAD": "Dulles",
    "IAH": "Houston",
    "JFK": "New York JFK",
    "LAS": "Las Vegas",
    "LAX": "Los Angeles",
    "LGA": "New York LGA",
    "MCO": "Orlando",
    "MEM": "Memphis",
    "MIA": "Miami",
    "MSP": "Minneapolis",
    "OAK": "Oakland",
    "ORD": "Chicago",
    "PDX": "Portland",
    "PHL": "Philadelphia",
    "PHX": "Phoenix",
    "PIT": "Pittsburgh",
    "SAN": "San Diego",
    "SEA": "Seattle",
    "SFO": "San Francisco",
    "SJC": "San Jose",
    "SLC": "Salt Lake City",
    "SMF": "Sacramento",
    "STL": "St Louis",
    "TPA": "Tampa",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """The content of the picture.

    `totals` and `cells` have an element for each of `airports`, and each element of `cells` one for each of
    `months`: None if there were no flights. `all_airports` and `all_flights` count what is not drawn, too.
    """

    airports: Sequence[str]
    months: Sequence[str]
    totals: Sequence[Delay]
    cells: Sequence[Sequence[Delay | None]]
    all_airports: int
    all_flights: int


def chart_of(delays: Delays, *, airports: int = AIRPORTS) -> Chart:
    """Return the chart of the busiest `airports`, sorted by mean delay, the longest first."""
    months = sorted({month for _, month in delays})
    by_airport: dict[str, Delay] = {}
    for (airport, _), delay in delays.items():
        before = by_airport.get(airport, Delay(0, 0))
        by_airport[airport] = Delay(
            before.flights + delay.flights, before.total_minutes + delay.total_minutes
        )
    busiest = sorted(by_airport, key=lambda airport: (-by_airport[airport].flights, airport))[:airports]
    chosen = sorted(busiest, key=lambda airport: (-by_airport[airport].mean_minutes, airport))
    return Chart(
        airports=chosen,
        months=months,
        totals=[by_airport[airport] for airport in chosen],
        cells=[[delays.get((airport, month)) for month in months] for airport in chosen],
        all_airports=len(by_airport),
        all_flights=sum(delay.flights for delay in by_airport.values()),
    )


def month_name(month: str) -> str:
    """Return the name of a month: ``February`` for ``2001/02``."""
    return calendar.month_name[int(month[5:7])]


def minutes(value: float) -> str:
    """Return rounded minutes as text, with the character for minus instead of a hyphen, and never ``-0``."""
    whole = round(value)
    return f"−{-whole}" if whole < 0 else str(whole)


def draw(delays: Delays, path: Path, *, how: str) -> None:
    """Draw the chart to a PNG file. `how` is a sentence that says how the means were computed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    chart = chart_of(delays)
    columns, rows = len(chart.airports), len(chart.months) + 1
    figure = Figure(figsize=(3.6 + 0.62 * columns, 3.9 + 0.62 * rows), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    bars, cells = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [1.5, 0.62 * rows], "hspace": 0.06}
    )
    figure.subplots_adjust(left=0.085, right=0.925, top=0.84, bottom=0.235)

    # The last row has all months together. A line separates it from the others.
    means = [[each.mean_minutes if each else None for each in column] for column in chart.cells]
    table = [[column[row] for column in means] for row in range(rows - 1)]
    table.append([total.mean_minutes for total in chart.totals])
    known = [value for row in table for value in row if value is not None]
    # Zero is the middle of the colours, although most means are above it: equal distances look equal.
    deepest = max(1.0, *map(abs, known))
    norm = Normalize(vmin=-deepest, vmax=deepest)
    image = cells.imshow(
        [[float("nan") if value is None else value for value in row] for row in table],
        aspect="auto",
        cmap="RdBu_r",
        norm=norm,
    )
    _label_cells(cells, chart, table, norm)
    _label_axes(cells, chart)
    _draw_bars(bars, chart)

    bar = figure.colorbar(image, ax=[bars, cells], fraction=0.02, pad=0.012, aspect=32)
    bar.set_label("mean delay, minutes (blue: early)", fontsize=9)
    bar.ax.set_ylim(min(*known, 0.0) - 1, max(*known, 0.0))
    bar.locator = MaxNLocator(integer=True)
    bar.outline.set_visible(False)
    months = f"{month_name(chart.months[0])} to {month_name(chart.months[-1])} {chart.months[0][:4]}"
    figure.text(
        0.02,
        0.94,
        f"Of the busiest airports, {_place(chart.airports[0])} had the longest delays: "
        f"{minutes(chart.totals[0].mean_minutes)} minutes on average",
        fontsize=17,
        weight="bold",
    )
    figure.text(
        0.02,
        0.89,
        f"Mean delay by airport of departure, {months}: the {columns} busiest of {chart.all_airports} "
        f"airports, latest first; {chart.all_flights:,} flights in all.",
        fontsize=11,
        color="#333333",
    )
    figure.text(0.02, 0.025, f"{SOURCE} {how}", fontsize=8.5, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _place(airport: str) -> str:
    return f"{CITIES[airport]} ({airport})" if airport in CITIES else airport


def _label_cells(axes: Any, chart: Chart, table: Sequence[Sequence[float | None]], norm: Any) -> None:
    """Write each cell's mean into it, and its number of flights beneath."""
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            if value is None:
                continue
            delay = chart.totals[column] if row == len(chart.months) else chart.cells[column][row]
            assert delay is not None, "a mean of no flights"
            # The colours at both ends of the scale are dark.
            color = "white" if abs(float(norm(value)) - 0.5) > 0.33 else "#222222"
            axes.text(column, row - 0.1, minutes(value), ha="center", va="center", color=color, fontsize=11)
            flights = f"n={delay.flights:,}"
            axes.text(column, row + 0.29, flights, ha="center", va="center", color=color, fontsize=6.5)


def _label_axes(axes: Any, chart: Chart) -> None:
    labels = [f"{airport}  {CITIES.get(airport, '')}".rstrip() for airport in chart.airports]
    axes.set_xticks(range(len(labels)), labels, rotation=50, ha="right", rotation_mode="anchor", fontsize=9.5)
    axes.set_yticks(
        range(len(chart.months) + 1), [*map(month_name, chart.months), "all months"], fontsize=10.5
    )
    axes.axhline(len(chart.months) - 0.5, color="white", linewidth=4)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_bars(axes: Any, chart: Chart) -> None:
    """Draw a bar above each column, with its airport's number of flights."""
    flights = [total.flights for total in chart.totals]
    axes.bar(range(len(flights)), flights, width=0.72, color="#b8bec6")
    for column, count in enumerate(flights):
        axes.text(column, count, f"{count:,}", ha="center", va="bottom", fontsize=7.5, color="#444444")
    axes.set_ylabel("flights", fontsize=9.5)
    axes.set_ylim(0, max(flights) * 1.18)
    axes.set_yticks([])
    axes.tick_params(bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
