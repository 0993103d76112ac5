"""An executor's Python without Laminar, and the archive that brings it as docs/spark.md tells."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

# What docs/spark.md names: all that executors need beside pyspark and pyarrow.
NEEDED = ("msgspec", "mmh3", "crc32c", *(("backports.zstd",) if sys.version_info < (3, 14) else ()))
# What a cluster's image has.
THERE = ("pyspark", "py4j", "pyarrow", "numpy")


def bare_python(folder: Path) -> Path:
    """A Python that has pyspark and pyarrow, and nothing else."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    ours = Path(sysconfig.get_path("purelib"))
    for name in THERE:
        (packages / name).symlink_to(ours / name)
    if (ours / "numpy.libs").exists():
        (packages / "numpy.libs").symlink_to(ours / "numpy.libs")
    return python


def archive(folder: Path) -> Path:
    """A zip of what `pip install --target` brings: the package, and what it needs on executors."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "laminar", folder / "laminar", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "laminar/spark/autoload/pyspark_laminar", folder / "pyspark_laminar")
    for name in NEEDED:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)
    return Path(shutil.make_archive(str(folder), "zip", folder))
