"""The flights: a file of JSON lines, and the delays in it, computed without Laminar and Spark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

DEFAULT_FILE = Path(__file__).parents[1] / "data" / "flights-20k.jsonl"


class BadFile(Exception):
    """The file of flights is missing, or its content is not one of flights."""


class Flight(msgspec.Struct, frozen=True):
    """One line of the file. `delay` is in minutes, negative when early; `date` is ``2001/01/31 23:59``."""

    date: str
    delay: int
    distance: int
    origin: str
    destination: str

    @property
    def month(self) -> str:
        """Year and month of the date."""
        return self.date[:7]


class Delay(NamedTuple):
    """The sums over a group of flights: integers, so that two computations can be compared exactly."""

    flights: int
    total_minutes: int

    @property
    def mean_minutes(self) -> float:
        """Mean delay in minutes."""
        return self.total_minutes / self.flights


# (airport, month) -> its delay
Delays = dict[tuple[str, str], Delay]


@dataclass(frozen=True, slots=True)
class Flights:
    """The file: each line's bytes, and the flight in it. A flight's number is its line's number, from 1."""

    lines: Sequence[bytes]
    flights: Sequence[Flight]

    def __len__(self) -> int:
        return len(self.lines)

    def numbers(self) -> dict[bytes, int]:
        """Return the number of each line, by the line's bytes."""
        return {line: number for number, line in enumerate(self.lines, start=1)}

    def delays(self) -> Delays:
        """Return the delays of the file's flights by airport of departure and month."""
        return delays_of(self.flights)


def delays_of(flights: Iterable[Flight]) -> Delays:
    """Return the delays of flights by airport of departure and month."""
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for flight in flights:
        group = sums[flight.origin, flight.month]
        group[0] += 1
        group[1] += flight.delay
    return {name: Delay(*group) for name, group in sums.items()}


def load(file: Path | None) -> Flights:
    """Read a file of flights; None reads the one in the source tree.

    Raises:
        BadFile: when the file is missing, has a line that is not a flight, or has two equal lines.
    """
    path = DEFAULT_FILE if file is None else file
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise BadFile(f"there is no file of flights at {path}") from None
    try:
        flights = Flights(lines, [msgspec.json.decode(line, type=Flight) for line in lines])
    except msgspec.MsgspecError as error:
        raise BadFile(f"{path} is no file of flights: {error}") from None
    # A record that is read back has no number: its line identifies the flight.
    if len(flights.numbers()) != len(lines):
        raise BadFile(f"{path}: two lines are equal, so their flights cannot be told apart")
    return flights
