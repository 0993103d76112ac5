"""Checks of this machine: settings, versions, names, limits, and the disk of the data folder."""

from __future__ import annotations

import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from laminar.cli.commands.doctor.lines import Line, fine, wrong
from laminar.node.api.bundle.allowed import settings_of
from laminar.node.host.settings import Settings, SettingsError
from laminar.node.host.settings_sources import load

# A name server that takes longer delays each new connection.
SLOW_NAME_S = 1.0
# Syncs of 4 KiB as the journal makes for appends, until one of the two bounds is reached.
SYNCS, SYNCS_S = 200, 2.0
SYNC_BYTES = 4096
SLOW_SYNC_S = 0.1
# Sooner than this no disk has it: then it is in memory only.
NO_DISK_S = 0.000_01
FEWEST_OPEN_FILES = 4_096
MANY_OPEN_FILES = 65_536


def of_versions() -> Iterator[Line]:
    """Yield a line with the versions of Laminar, Python and the kernel."""
    from importlib.metadata import version

    from laminar.compiled import described

    yield fine(
        "versions",
        f"laminar {version('laminar-mq')} ({described()}), Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {len(os.sched_getaffinity(0))} CPUs",
    )


def of_settings(config: Path | None) -> tuple[list[Line], Settings]:
    """Load the settings that a node would have here; return the report's lines about them, and the settings.

    If a setting is wrong, a line says so, and the settings returned are the defaults.

    Values are shown as in bundles (no secrets), each with its source.
    """
    try:
        loaded = load(config=config, environ=os.environ)
    except SettingsError as error:
        do = "correct it; `laminar config show --origin` shows the rest"
        lines = [wrong("settings", f"{error.origin or 'a setting'}: {error.name} cannot be used", do)]
        return lines, Settings()
    shown = settings_of(loaded.settings)
    own = [
        fine("settings", f"{name} = {each['value']}, from {loaded.origins[name]}")
        for name, each in shown.items()
        if loaded.origins[name] != "default"
    ]
    return own or [fine("settings", f"all {len(shown)} have their defaults")], loaded.settings


def of_names(urls: Iterable[str]) -> Iterator[Line]:
    """Yield a line for each host of the URLs, and for this machine's own name."""
    for host in dict.fromkeys([*(urlsplit(url).hostname or "" for url in urls), socket.gethostname()]):
        began_s = time.perf_counter()
        try:
            found = {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except OSError:
            do = "enter it into the name server or /etc/hosts, or use an address"
            yield wrong("names", f"{host} has no address", do)
            continue
        took_s = time.perf_counter() - began_s
        if took_s > SLOW_NAME_S:
            yield wrong(
                "names", f"{host} was found after {took_s:.1f} s", "look at the name servers of this machine"
            )
        elif found != {host}:
            yield fine("names", f"{host} is {', '.join(sorted(found))}, found in {took_s * 1000:.0f} ms")


def of_limits() -> Iterator[Line]:
    """Yield lines on the limits of a process here: open files, locked memory."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = "a process may open any number of files" if hard < 0 else f"a process may open {hard:,} files"
    if 0 <= hard < FEWEST_OPEN_FILES:
        do = f"raise the hard limit (LimitNOFILE of systemd, `ulimit -Hn`) to {MANY_OPEN_FILES} or more"
        yield wrong("open files", text, do)
    else:
        yield fine("open files", text)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    yield fine(
        "locked memory", "without a limit" if locked < 0 else f"{locked:,} bytes; only --steer needs some"
    )


def of_disk(folder: Path, settings: Settings) -> Iterator[Line]:
    """Yield lines on the free space and the sync time of the disk on which a folder is, or would be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    space = os.statvfs(there)
    free = space.f_bavail * space.f_frsize
    percent = settings.low_water_percent / 100
    if free < min(settings.low_water_bytes, space.f_blocks * space.f_frsize * percent):
        do = "free some: a node here would refuse appends (low_water_bytes, low_water_percent)"
        yield wrong("free space", f"{free:,} bytes are free", do)
    else:
        yield fine("free space", f"{free:,} bytes are free")
    try:
        took_s = sorted(sync_times(there))
    except OSError as error:
        do = "run it as the user of the node, or name another folder of that disk with --data"
        yield wrong("sync time", f"{there} cannot be written: {error.strerror}", do)
        return
    half_s, most_s = percentile(took_s, 0.5), percentile(took_s, 0.99)
    text = (
        f"of {len(took_s)} syncs half took at most {half_s * 1000:.2f} ms, "
        f"99 % at most {most_s * 1000:.2f} ms, the longest {took_s[-1] * 1000:.2f} ms"
    )
    if most_s > SLOW_SYNC_S:
        yield wrong(
            "sync time", text, "each append waits for one: use another disk, or find what else writes to it"
        )
    elif half_s < NO_DISK_S:
        yield wrong(
            "sync time", text, "no disk is so fast: the folder may be in memory (tmpfs), and lost with it"
        )
    else:
        yield fine("sync time", text)


def sync_times(folder: Path) -> list[float]:
    """Return the times (s) that appends of 4 KiB with an fdatasync took, in a temporary file of `folder`."""
    took: list[float] = []
    block = os.urandom(SYNC_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        ends_s = time.perf_counter() + SYNCS_S
        while not took or (len(took) < SYNCS and time.perf_counter() < ends_s):
            began_s = time.perf_counter()
            file.write(block)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began_s)
    return took


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the percentile at `share` (0 to 1) of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
