"""Host names whose addresses a test chooses and changes, without root: see `names.c`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("names.c")
SUFFIXES = (".test", ".svc")


class Names:
    """The names, for processes that have the `environment`. `folder` keeps the list and the library.

    Raises:
        CalledProcessError: there is no C compiler that can build the library.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "names"
        self._known: dict[str, str] = {}
        self._library = folder / "names.so"
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        command = ["cc", *flags, "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that a process needs to know the names."""
        return {"LD_PRELOAD": str(self._library), "TEST_NAMES": str(self._file)}

    def set(self, name: str, address: str) -> None:
        """Give a name another address, at once for every process."""
        assert name.endswith(SUFFIXES), name
        self._known[name] = address
        self._write()

    def forget(self, name: str) -> None:
        """Let a name have no address."""
        if self._known.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{name} {address}\n" for name, address in self._known.items()))
        os.rename(new, self._file)
