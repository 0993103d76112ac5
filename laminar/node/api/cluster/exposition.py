"""The text format of Prometheus, version 0.0.4: metric families and their samples as lines.

It decides names, escapes and order of the lines, and does not know what is measured. Our own, as a node needs
only these few rules: the library for it loads an HTTP server and took 30 ms of each start of a node.
Reference: https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(StrEnum):
    """The types of metric that a node has, as the format names them."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A metric, with a sample for each set of values of its labels.

    The name of a counter ends with ``_total``.
    """

    name: str
    help: str
    kind: Kind
    labels: Sequence[str]
    _samples: list[str] = field(default_factory=list)

    def add(self, values: Sequence[str], number: float) -> None:
        """Append the sample with these values of the labels."""
        pairs = zip(self.labels, values, strict=True)
        labels = ",".join(f'{label}="{_escaped_value(value)}"' for label, value in pairs)
        self._samples.append(f"{self.name}{{{labels}}} {float(number)!r}\n")

    def text(self) -> str:
        """Return the lines of the family."""
        text = self.help.replace("\\", r"\\").replace("\n", r"\n")
        head = f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n"
        return head + "".join(self._samples)


def exposition(families: Iterable[Family]) -> bytes:
    """Return the body of an answer with these families."""
    return "".join(family.text() for family in families).encode()


def _escaped_value(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
