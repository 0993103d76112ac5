"""The context file: clusters by name, and which is the current one.

This module reads and writes the file; the client only reads it. Its form is in
`laminar.client.net.endpoints`. Only the command line uses the key ``create_topics``: `laminar dev` sets it,
so that producing to a missing topic creates the topic.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from laminar.cli.errors import UsageError
from laminar.client.net.endpoints import context_file, is_left_behind


@dataclass(slots=True)
class Contexts:
    """The content of the context file. `save` writes the whole file."""

    path: Path
    current: str | None = None
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None) -> Contexts:
        """Read the file; a missing one is empty. Raises UsageError if it cannot be read."""
        path = context_file(os.environ if environment is None else environment)
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return cls(path)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
            raise UsageError(f"{path}: {fault}") from None
        named = {
            name: dict(each) for name, each in content.get("contexts", {}).items() if isinstance(each, dict)
        }
        # Contexts of a `laminar dev` that was killed name nodes that do not run any more.
        named = {name: each for name, each in named.items() if not is_left_behind(each)}
        current = content.get("current")
        return cls(path, current if isinstance(current, str) and current in named else None, named)

    def save(self) -> None:
        """Replace the file atomically. Only its owner may read it, as it may contain tokens."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(
                os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(self.text())
            fresh.replace(self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()

    def text(self) -> str:
        """Return the file's content, as TOML."""
        lines = [] if self.current is None else [f"current = {_toml(self.current)}", ""]
        for name, context in sorted(self.by_name.items()):
            lines.append(f"[contexts.{_toml(name)}]")
            lines += [f"{key} = {_toml(value)}" for key, value in context.items()]
            lines.append("")
        return "\n".join(lines)


def _toml(value: str | bool | int | float | list[str]) -> str:
    # Strings, lists of strings, numbers and booleans are written in TOML as in JSON; only DEL must be
    # escaped.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")


def creates_topics(url: str | None) -> bool:
    """Return whether a missing topic may be created: the command uses the current context, which permits it.

    `url` is the command's ``--url``.
    """
    if url is not None or os.environ.get("LAMINAR_URL"):
        return False
    contexts = Contexts.load()
    return bool(contexts.by_name.get(contexts.current or "", {}).get("create_topics"))
