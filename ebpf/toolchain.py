"""The compiler of the program: it finds BCC and kernel headers on this machine, and compiles with them.

BCC is pure Python over libbcc. It comes from the system's packages, so it is outside of this program's
environment. It is imported by the path of its file. If that folder were added to `sys.path`, all its other
packages (another numpy, say) could be imported, too. Compile only in a process that ends soon: BCC loads a
compiler.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ebpf.kernel import possible_cpus

BCC_PLACES = ("/usr/lib/python3/dist-packages", "/usr/lib/python3/site-packages")
HEADERS_VARIABLE = "LAMINAR_KERNEL_HEADERS"
SOURCE_FOLDER = Path(__file__).parent
SOURCES = ("steer.c", "ownership.h")
MAPS = ("targets", "cpus", "steered", "passed")
# The name of a machine's folder in the kernel's source, by what `uname -m` says.
_KERNEL_ARCH = {"x86_64": "x86", "aarch64": "arm64", "riscv64": "riscv", "ppc64le": "powerpc"}


class CompileError(Exception):
    """BCC could not compile the program. The text is BCC's error and the compiler's output."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Kernel headers: the folder common to all builds of a version, and the one generated for one build.

    They may be the same folder.
    """

    common: Path
    generated: Path


def find_bcc() -> Path | None:
    """Return the path of BCC's module ``libbcc.py``, which is in BCC's folder; None if it isn't installed."""
    places = [*BCC_PLACES, *(path for path in sys.path if path)]
    return next((found for place in places if (found := Path(place) / "bcc" / "libbcc.py").is_file()), None)


def find_headers() -> Headers | None:
    """Return the headers of the running kernel, else the newest installed ones; None if there are none.

    The environment variable `HEADERS_VARIABLE` names the only folder to look in, if it is set. Headers of
    another kernel will do: the program uses only the stable interface to user programs.
    """
    release = platform.release()
    places = [Path(f"/lib/modules/{release}/build"), Path(f"/usr/src/linux-headers-{release}")]
    if HEADERS_VARIABLE in os.environ:
        places = [Path(os.environ[HEADERS_VARIABLE])]
    else:
        others = [*Path("/lib/modules").glob("*/build"), *Path("/usr/src").glob("linux-headers-*")]
        others.sort(key=lambda path: list(map(int, re.findall(r"\d+", str(path)))))
        places += reversed(others)
    for place in places:
        if (headers := _headers_in(place)) is not None:
            return headers
    return None


def _headers_in(place: Path) -> Headers | None:
    """Return the headers in the folder `place` of one build; None if they are incomplete.

    Debian has the headers that all builds of a version share in a folder beside it.
    """
    generated = place.resolve()
    if not (generated / "include/generated/autoconf.h").is_file():
        return None
    common = [generated]
    shared = re.match(r"linux-headers-(\d+(\.\d+)*-\d+)", generated.name)
    if shared:
        common.append(generated.parent / f"linux-headers-{shared[1]}-common")
    link = Path("/lib/modules") / generated.name.removeprefix("linux-headers-") / "source"
    common.append(link.resolve())
    arch = _KERNEL_ARCH.get(platform.machine(), platform.machine())
    for folder in common:
        if (folder / "include/linux/kconfig.h").is_file() and (folder / "arch" / arch / "include").is_dir():
            return Headers(folder, generated)
    return None


def digest() -> str:
    """Return a digest of the program's source and the number of CPUs; with an equal one nodes share it."""
    made_of = blake2b(digest_size=6)
    for name in SOURCES:
        made_of.update((SOURCE_FOLDER / name).read_bytes())
    made_of.update(str(possible_cpus()).encode())
    return made_of.hexdigest()


@dataclass(slots=True)
class Compiled:
    """The compiled program: its instructions, and its maps' descriptors by name, which the caller closes."""

    instructions: bytes
    maps: dict[str, int]


def compile_program() -> Compiled:
    """Compile the XDP program and create its BPF maps; return both.

    Raises:
        CompileError: BCC could not compile it; the text has the compiler's output.
        LookupError: BCC or the headers are missing.
    """
    found, headers = find_bcc(), find_headers()
    if found is None or headers is None:
        raise LookupError("BCC is not installed" if found is None else "no kernel headers are installed")
    arch = _KERNEL_ARCH.get(platform.machine(), platform.machine())
    generated = [
        f"{headers.generated}/{folder}"
        for folder in (
            *(f"arch/{arch}/include/generated", f"arch/{arch}/include/generated/uapi"),
            *("include", "include/generated/uapi"),
        )
    ]
    text = (SOURCE_FOLDER / "steer.c").read_bytes()
    os.environ["BCC_KERNEL_SOURCE"] = str(headers.common)
    with _captured_stderr() as said:
        folders = (SOURCE_FOLDER, *generated)
        flags = [f"-DLAMINAR_CPUS={possible_cpus()}", *(f"-I{folder}" for folder in folders)]
        try:
            module = _import_bcc(found.parent).BPF(text=text, cflags=flags)
            instructions = module.dump_func(b"steer")
            maps = {name: os.dup(module[name.encode()].map_fd) for name in MAPS}
        except Exception as error:  # BCC raises nothing more precise
            raise CompileError(f"{error}\n{said()}".strip()) from error
    return Compiled(instructions, maps)


def _import_bcc(folder: Path) -> Any:
    """Import the package `bcc` from exactly this folder, without making the packages beside it importable."""
    if "bcc" in sys.modules:
        return sys.modules["bcc"]
    spec = importlib.util.spec_from_file_location(
        "bcc", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, folder
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in its source
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["bcc"]
            raise
    return module


@contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Redirect standard error, C code's too, to memory; yield a function that returns what was written."""
    memory = os.memfd_create("said")
    before = os.dup(2)
    os.dup2(memory, 2)

    def said() -> str:
        return os.pread(memory, 1 << 20, 0).decode(errors="replace").strip()

    try:
        yield said
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(memory)
