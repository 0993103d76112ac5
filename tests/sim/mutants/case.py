"""A rule switched off, and who must notice."""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutation import Mutant


@dataclass(frozen=True, slots=True)
class Case:
    """A mutant, and the tests that must catch it where the simulator need not (none: the protocol's)."""

    mutant: Mutant
    tests: tuple[str, ...] = ()
    # It is met by worlds of routes.
    routes: bool = False
    # It is met by worlds of routes where ended partitions are reclaimed.
    reclaims: bool = False
    # It is met by worlds of channels.
    channels: bool = False
    # Liveness or speed is all that it breaks: not the simulator's to see.
    tests_only: bool = False


def case(
    name: str,
    where: str,
    old: str,
    new: str,
    *,
    tests: tuple[str, ...] = (),
    tests_only: bool = False,
    routes: bool = False,
    reclaims: bool = False,
    channels: bool = False,
) -> Case:
    """In the function `where`, the text `old` becomes `new`."""
    return Case(Mutant(name, where, old, new), tests, routes, reclaims, channels, tests_only)
