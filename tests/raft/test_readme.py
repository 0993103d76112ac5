"""The example in raft/README.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "raft" / "README.md"


def test_the_example_runs() -> None:
    """It asserts by itself that the entry is committed everywhere."""
    [example] = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    exec(compile(example, str(README), "exec"), {"__name__": "example"})
