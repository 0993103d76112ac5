"""The requirements of steering: what a machine needs before an XDP program can be attached.

The checks are cheap, change nothing, and import no compiler. Whether the program really loads is known only
after loading it (`ebpf.loader.try_loading`).
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from ebpf import kernel
from ebpf.toolchain import HEADERS_VARIABLE, find_bcc, find_headers

OLDEST_KERNEL = (5, 15)
"""The first version in which a program in generic mode can redirect to a CPU; older ones lose the packet."""
_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}
_MAP_CREATE = 0
_DEBIAN_ARCH = {"x86_64": "cloud-amd64", "aarch64": "cloud-arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One requirement for steering, and whether this machine meets it."""

    name: str
    met: bool
    found: str
    """What was found; if it is not enough, the reason in a few words."""
    package: str = ""
    """The Debian package that provides it, if one does."""

    @property
    def reason(self) -> str:
        """The text to show if the requirement is not met; it names the Debian package that helps, if any."""
        return f"{self.found} (Debian: apt-get install {self.package})" if self.package else self.found


def requirements() -> list[Requirement]:
    """Return all requirements, met or not, in the order in which to meet them."""
    return [_kernel(), _privilege(), _system_call(), _bcc(), _headers()]


def first_unmet() -> Requirement | None:
    """Return the first unmet requirement, or None if a program can presumably be loaded."""
    return next((each for each in requirements() if not each.met), None)


def _kernel() -> Requirement:
    release = platform.release()
    version = re.match(r"(\d+)\.(\d+)", release)
    met = platform.system() == "Linux" and version is not None
    met = met and (int(version[1]), int(version[2])) >= OLDEST_KERNEL if version else False
    wanted = "" if met else f", and {'.'.join(map(str, OLDEST_KERNEL))} or newer is needed"
    return Requirement(name="kernel", met=met, found=f"{platform.system()} {release}{wanted}")


def _privilege() -> Requirement:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    lacking = [name for bit, name in _CAPABILITIES.items() if not mask >> bit & 1]
    found = (
        f"no privilege: {' and '.join(lacking)} (run as root)"
        if lacking
        else " and ".join(_CAPABILITIES.values())
    )
    return Requirement(name="privilege", met=not lacking, found=found)


def _system_call() -> Requirement:
    # Make the smallest possible map: some sandboxes refuse the system call even to root.
    try:
        os.close(kernel.call(_MAP_CREATE, Struct("@IIII").pack(2, 4, 4, 1)))
    except OSError as error:
        return Requirement(
            name="bpf(2)", met=False, found=f"bpf(2) is refused: {os.strerror(error.errno or 0)}"
        )
    return Requirement(name="bpf(2)", met=True, found="allowed")


def _bcc() -> Requirement:
    found = find_bcc()
    said = str(found.parent) if found is not None else "BCC is not installed"
    return Requirement(
        name="BCC", met=found is not None, found=said, package="" if found else "python3-bpfcc"
    )


def _headers() -> Requirement:
    headers = find_headers()
    if headers is not None:
        return Requirement(name="kernel headers", met=True, found=str(headers.generated))
    if HEADERS_VARIABLE in os.environ:
        said = f"{HEADERS_VARIABLE} names no folder of kernel headers: {os.environ[HEADERS_VARIABLE]}"
        return Requirement(name="kernel headers", met=False, found=said)
    package = f"linux-headers-{_DEBIAN_ARCH.get(platform.machine(), 'generic')}"
    return Requirement(
        name="kernel headers", met=False, found="no kernel headers are installed", package=package
    )
