"""Finds BCC and kernel headers on this machine, and compiles the program with them.

BCC comes from the system's packages, so it is outside of our environment; it is pure Python over libbcc. It
is imported by its file's place, never by adding that folder to `sys.path`, which would make visible whatever
else is there (another numpy, say). Import it only in a process that ends soon: BCC loads a compiler.
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
# The kernel's folders have names of their own for what `uname -m` says.
_KERNEL_ARCH = {"x86_64": "x86", "aarch64": "arm64", "riscv64": "riscv", "ppc64le": "powerpc"}


class CompileError(Exception):
    """BCC could not compile the program. The text is the compiler's."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Kernel headers: the folder with the common ones, and the one generated for a build."""

    common: Path
    generated: Path


def find_bcc() -> Path | None:
    """Return BCC's folder, or None if it isn't installed."""
    places = [*BCC_PLACES, *(path for path in sys.path if path)]
    return next((found for place in places if (found := Path(place) / "bcc" / "libbcc.py").is_file()), None)


def find_headers() -> Headers | None:
    """Return headers of the running kernel, else the newest of any; None if there are none.

    Only the kernel's interface to programs is used, which doesn't change.
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
    """Return the headers in a folder, with Debian's folder of what all builds of a version share."""
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
    """Return a name of the program by its source and this machine's CPUs: nodes with one digest share it."""
    made_of = blake2b(digest_size=6)
    for name in SOURCES:
        made_of.update((SOURCE_FOLDER / name).read_bytes())
    made_of.update(str(possible_cpus()).encode())
    return made_of.hexdigest()


@dataclass(slots=True)
class Compiled:
    """The program's code, and descriptors of its maps by name."""

    instructions: bytes
    maps: dict[str, int]


def compile_program() -> Compiled:
    """Compile the program and make its maps.

    Raises:
        CompileError: with the compiler's output.
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
    """Import the package in exactly this folder, without making its folder's neighbours importable."""
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
    """Redirect the standard error of C code to memory; yield a function that reads it."""
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
