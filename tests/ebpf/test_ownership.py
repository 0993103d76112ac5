"""The C arithmetic says what `router` says: compiled from the very file that the XDP program includes."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from ebpf.layout import MAX_SHARDS
from ebpf.toolchain import SOURCE_FOLDER
from router import owner_shard, shard_of_source_port

GOLDEN = json.loads((Path(__file__).parents[1] / "router" / "golden.json").read_text())
KEYS = 300_000
WRAPPER = """
#include <stdint.h>
typedef uint32_t u32;
typedef uint64_t u64;
#include "ownership.h"
void owners(const u32 *hashes, const u32 *shards, u32 *found, u32 count)
{
	for (u32 i = 0; i < count; i++)
		found[i] = laminar_owner_shard(hashes[i], shards[i]);
}
u32 by_port(u32 port, u32 shards) { return laminar_shard_of_source_port(port, shards); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    folder = tmp_path_factory.mktemp("ownership")
    (folder / "wrapper.c").write_text(WRAPPER)
    made = folder / "ownership.so"
    command = [
        "cc",
        "-O2",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        f"-I{SOURCE_FOLDER}",
        "-shared",
        "-fPIC",
    ]
    subprocess.run([*command, "-o", made, folder / "wrapper.c"], check=True, timeout=60)
    return ctypes.CDLL(str(made))


def owners(library: ctypes.CDLL, keys: list[tuple[int, int]]) -> list[int]:
    """What C says of (partition hash, shards)."""
    array = ctypes.c_uint32 * len(keys)
    found = array()
    library.owners(array(*(key for key, _ in keys)), array(*(shards for _, shards in keys)), found, len(keys))
    return list(found)


def test_owners_match_the_golden_vectors(library: ctypes.CDLL) -> None:
    """The vectors that hold the Python side hold this one, as far as shards are steered."""
    rows = [row for row in GOLDEN["owner_shard"] if row[1] <= MAX_SHARDS]

    assert rows
    assert [owner for _, _, owner in rows] == owners(library, [(key, shards) for key, shards, _ in rows])


def test_owners_are_those_of_the_router(library: ctypes.CDLL, pytestconfig: pytest.Config) -> None:
    """Random hashes, 1 to 127 shards, most with few, and hashes at the ends of the range."""
    rng = random.Random(pytestconfig.getoption("hypothesis_seed", None) or 7)
    keys = [
        (key, shards) for key in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF) for shards in range(1, MAX_SHARDS)
    ]
    keys += [(rng.getrandbits(32), rng.choice((1, 2, 3, 4, 8, 16))) for _ in range(KEYS)]
    keys += [(rng.getrandbits(32), rng.randint(1, MAX_SHARDS)) for _ in range(KEYS // 100)]

    assert [owner_shard(key, shards) for key, shards in keys] == owners(library, keys)


def test_every_source_port_goes_to_the_shard_that_the_router_says(library: ctypes.CDLL) -> None:
    """All 65,536 ports, for some numbers of shards."""
    for shards in (1, 2, 3, 4, 8, MAX_SHARDS):
        expected = [shard_of_source_port(port, shards) for port in range(1 << 16)]

        assert expected == [library.by_port(port, shards) for port in range(1 << 16)]
