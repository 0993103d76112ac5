"""The allow-list of a bundle: settings, labels and fields that are not named here are left out, new ones too.

A bundle contains names of nodes, topics and metrics, and numbers. It contains no record, key, header, token
or secret, no name of a principal, consumer or channel, and no text from a client or another program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from laminar.node.host.settings import SETTINGS, Settings

SETTINGS_SHOWN: Final = frozenset(
    """
    node host advertise_host port shards access insecure hosts console weight zone pin steer
    drain_ms log_level log_format election_timeout_ms heartbeat_ms segment_size_bytes journal_file_bytes
    scrub_bytes_per_s search_bytes_per_s catch_up_bytes_per_s catch_up_bytes replace_after_ms settle_ms
    balance_threshold balance_hours max_partitions max_job_streams max_append_bytes max_upload_bytes
    retention_check_ms retention_hold_ms low_water_bytes low_water_percent trash_ms default_replicas
    """.split()
)
"""Settings whose values are shown. Of the others only whether they are set: URLs may have passwords."""

LABELS_SHOWN: Final = frozenset(
    ("process", "topic", "state", "operation", "code", "le", "quantile", "reason")
)
"""Labels of metrics.

A sample with any other label is left out, as its value may be a name given by a client.
"""
MOST_SAMPLES: Final = 5_000

_SAMPLE: Final = re.compile(r"(laminar_[a-z0-9_]+)(?:\{(.*)\})? (\S+)\Z")
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def settings_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return by name the value of each setting, and whether it is the default.

    The value of a setting that is not on the allow-list is only "set" or "not set".
    """
    found: dict[str, dict[str, Any]] = {}
    for row in SETTINGS:
        value = getattr(settings, row.name)
        shown = value if row.name in SETTINGS_SHOWN else "set" if value else "not set"
        found[row.name] = {"value": shown, "is_default": value == row.default}
    return found


def samples_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of `/metrics` whose labels are all allowed."""
    for line in lines:
        match = _SAMPLE.match(line)
        if match is not None and all(name in LABELS_SHOWN for name, _ in _LABEL.findall(match[2] or "")):
            yield line
