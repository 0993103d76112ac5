"""Examples of a parametrized test that `make test` leaves to `make test-long`."""

from __future__ import annotations

from typing import Any

import pytest


def long(*examples: Any) -> list[Any]:
    """Return these examples, marked: ``parametrize("seed", [1, *long(2, 3)])``. A tuple is one example."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long)
        for each in examples
    ]
