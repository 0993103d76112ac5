"""The report of a load: the set-up, the figures, and reasons not to trust them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laminar.cli.commands.bench.tally import Tally
from laminar.cli.errors import complain
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PARTLY
from laminar.cli.output import show_json

# The rate counts as reached if the last answer comes at most so much later than the schedule ends.
LATE, LATE_S = 0.05, 0.5


class Report:
    """The report of a load that has ended.

    `about` is the set-up, `load` the request: kind, rate, seconds and so on. `read` has the figures of the
    reader that followed the topic. `is_whole` tells that the load was not interrupted.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        load: Mapping[str, Any],
        tally: Tally,
        *,
        is_whole: bool,
        read: Tally | None = None,
    ) -> None:
        self._load = load
        self._is_whole = is_whole
        self.document = {**about, "load": load, **tally.stated(), "interrupted": not is_whole}
        if read is not None:
            self.document["read"] = {**read.stated(), "unread": max(0, tally.done - read.done)}
        self.document["rate_reached"] = not self._shortfall() if load["rate"] and is_whole else None

    def show(self, *, json: bool) -> int:
        """Print the figures, and reasons not to trust them on standard error; return the exit code."""
        if json:
            show_json(self.document)
        else:
            for name, text in self._lines():
                print(f"{name:<16}{text}".rstrip())
        notes = self._notes()
        for note in notes:
            complain(note)
        if not self._is_whole:
            return EXIT_INTERRUPTED
        if not self.document["records"]:
            return EXIT_FAILED
        return EXIT_PARTLY if notes else EXIT_DONE

    def _shortfall(self) -> str:
        """Return by how much the requested rate was missed; "" if it was reached."""
        found, rate = self.document, self._load["rate"]
        if self._load["kind"] == "consume":
            late = found["latency_ms"]["max"] > LATE_S * 1000 and found["records_per_s"] < (1 - LATE) * rate
            return "records were read later than they were due" if late else ""
        if found["not_sent"]:
            return f"{found['not_sent']:,} of {found['due']:,} records that were due were not sent"
        late_s = found["seconds"] - self._load["seconds"]
        if late_s > max(LATE_S, LATE * self._load["seconds"]):
            return f"the last receipt came {late_s:.1f} s after the end"
        return ""

    def _notes(self) -> list[str]:
        """Return the reasons why the figures are not those of the requested load."""
        found, rate = self.document, self._load["rate"]
        if not self._is_whole:
            return ["it was interrupted: the figures are those until then"]
        notes = []
        if rate and self._shortfall():
            notes.append(
                f"the rate of {rate:,.10g} records/s was not reached: {self._shortfall()}. "
                f"{found['records_per_s']:,} were; the latencies are those of a queue that grows"
            )
        codes = ", ".join(f"{count:,} {code}" for code, count in found["errors"].items())
        if codes:
            notes.append(
                f"the reading ended: {codes}"
                if self._load["kind"] == "consume"
                else f"without a receipt: {codes}"
            )
        elif not found["records"]:
            notes.append("there was no record; `laminar bench produce` makes a topic with some")
        read = found.get("read")
        if read and read["errors"]:
            notes.append(f"the reader ended: {', '.join(read['errors'])}")
        if read and read["unread"]:
            notes.append(
                f"{read['unread']:,} records have a receipt and were not read 10 s after the last that was; "
                f"`laminar cluster doctor` says more"
            )
        return notes

    def _lines(self) -> list[tuple[str, str]]:
        """Return the report for a person, as pairs of a name and a text."""
        found, load, client = self.document, self._load, self.document["client"]
        alive = sum(bool(each["alive"]) for each in found["nodes"])
        shards = sum(each["shards"] for each in found["nodes"])
        is_paced = bool(load["rate"]) and load["kind"] != "consume"
        lines = [
            (
                "nodes",
                f"{alive} of {len(found['nodes'])} alive, {shards} shards, version {found['server_version']}",
            ),
            (
                "topic",
                f"{found['topic']}: {found['partitions']} partitions, {found['replicas']} replicas, "
                f"flush {found['flush']}",
            ),
            (
                "client",
                f"version {client['version']} ({client['modules']}), Python {client['python']}, "
                f"{client['cpus']} CPUs, {client['system']}",
            ),
            ("load", self._asked()),
            ("", ""),
            (
                "records",
                f"{found['records']:,} in {found['seconds']:.2f} s: {found['records_per_s']:,} records/s, "
                f"{found['mb_per_s']:,} MB/s",
            ),
            ("latency, ms", f"{_times(found['latency_ms'])}  ({self._meaning()})"),
        ]
        if "read" in found:
            lines.append(("until read, ms", f"{_times(found['read']['latency_ms'])}  (from when it was due)"))
        if is_paced:
            lines.append(
                ("own delay, ms", f"{_times(found['own_delay_ms'])}  (of that: until it was handed over)")
            )
        errors = ", ".join(f"{count:,} {code}" for code, count in found["errors"].items())
        return [
            *lines,
            ("longest gap", f"{found['longest_gap_s']:.3f} s without a success"),
            ("errors", errors or "none"),
        ]

    def _asked(self) -> str:
        load = self._load
        parts = [load["kind"]]
        if "size" in load:
            parts.append(f"records of {load['size']:,} bytes")
        parts.append(f"{load['rate']:,.10g} records/s" if load["rate"] else "as fast as it goes")
        parts.append(f"{load['seconds']:g} s" if load["seconds"] else "all that is there")
        if "batch_bytes" in load:
            parts.append(f"batches of {load['batch_bytes']:,} bytes")
        if "in_flight" in load:
            parts.append(f"at most {load['in_flight']:,} in flight")
        return ", ".join(parts)

    def _meaning(self) -> str:
        """Return a sentence that says what a latency of this load is."""
        if self._load["kind"] == "consume":
            return "how late a record was read" if self._load["rate"] else "the wait for a batch"
        if self._load["rate"]:
            return "from when a record was due to its receipt"
        return "from the client's buffer, which is full, to the receipt"


def _times(found: Mapping[str, float]) -> str:
    return "  ".join(f"{name.replace('_', '.')} {value:,.2f}" for name, value in found.items())
