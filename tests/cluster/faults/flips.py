"""Bits that turn over in the files of a node that does not run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Flip:
    """One bit of a file, and the byte as it was."""

    path: Path
    position: int
    byte: int

    def is_whole(self) -> bool:
        """Whether the byte is again what it was; also where the file is gone, its records given up."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                return file.read(1) == bytes([self.byte])
        except FileNotFoundError:
            return True

    def of_partition(self) -> tuple[str, int]:
        """The topic and partition of the file."""
        return self.path.parent.name.split("-")[0], partition_of(self.path)

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}@{self.position}"


def flip_segments(
    data: Path,
    rng: random.Random,
    *,
    most: int = 3,
    among: Callable[[int], bool] = lambda partition: True,
) -> list[Flip]:
    """Turn up to `most` bits in segments of partitions that `among` lets be damaged, one bit a file.

    Where entries are to keep a whole copy, the caller sees to it that another node's bits turn only when
    these are healed, or only those of other partitions.
    """
    files = [path for path in sorted(data.glob("logs/*/*.log")) if among(partition_of(path))]
    rng.shuffle(files)
    flipped: list[Flip] = []
    for path in files:
        content = path.read_bytes().rstrip(b"\0")
        if not content or len(flipped) == most:
            continue
        position = rng.randrange(len(content))
        flip = Flip(path, position, content[position])
        with path.open("r+b") as file:
            file.seek(flip.position)
            file.write(bytes([flip.byte ^ 1 << rng.randrange(8)]))
        flipped.append(flip)
    return flipped


def partition_of(segment: Path) -> int:
    """Of `logs/TOPIC-PARTITION-ID/x.log` the partition, -1 for the catalog. No topic of ours has a hyphen.

    A log that a catch-up builds has a `+` after its number.
    """
    topic, number = segment.parent.name.split("-")[:2]
    return -1 if topic == "catalog" else int(number.removesuffix("+"))
