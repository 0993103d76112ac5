"""`import laminar` is cheap, and the client drags in neither the server nor an optional library."""

from __future__ import annotations

import subprocess
import sys

import pytest

import laminar

FORBIDDEN = (
    "raft membership router ebpf uvloop pysyncobj swimprotocol pyarrow pyspark cyclopts rich "
    "laminar.node laminar.log laminar.cli pandas polars numpy"
).split()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    "name",
    ["laminar", "laminar.aio", "laminar.client.sync.client", "laminar.testing", "laminar.testing.plugin"],
)
def test_nothing_heavy_is_imported(name: str) -> None:
    """Of the modules of an import, none is forbidden."""
    loaded = run(f"import sys, {name}; print(*sys.modules)").split()
    found = {module for module in loaded for root in FORBIDDEN if f"{module}.".startswith(f"{root}.")}

    assert set() == found


def test_importing_laminar_takes_under_a_tenth_of_a_second() -> None:
    """Of its own computing, whatever else the machine does meanwhile; of three runs the quickest."""
    code = "import time; a = time.process_time(); import laminar; print(time.process_time() - a)"

    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_every_public_name_is_there() -> None:
    """__all__ names what the lazy table and the module have, and nothing else resolves."""
    for name in laminar.__all__:
        assert getattr(laminar, name) is not None
    assert set(laminar.__all__) <= set(dir(laminar))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        laminar.nothing  # noqa: B018
