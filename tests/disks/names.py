"""The names of the fault disk: directories whose unsynced changes are kept apart.

A directory is what is durable (a table in memory, or a directory of the operating system) and a few changes
on top. Each change waits until one of the directories it concerns is synced; a change that is committed takes
those before it along that concern the same file. What is lost is simply forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.disks.contents import Content, Platter


class Node:
    """A file or directory. `parent` and `name` say where the operating system has it, if it does."""

    def __init__(self, parent: Directory | None, name: str) -> None:
        self.parent = parent
        self.name = name

    @property
    def real_path(self) -> str:
        return "/" if self.parent is None else os.path.join(self.parent.real_path, self.name)


class FileNode(Node):
    def __init__(self, parent: Directory | None, name: str, content: Content | None = None) -> None:
        super().__init__(parent, name)
        self._content = content

    @property
    def content(self) -> Content:
        if self._content is None:
            self._content = Content(Platter(self.real_path))
        return self._content


class Directory(Node):
    def __init__(self, parent: Directory | None = None, name: str = "") -> None:
        super().__init__(parent, name)
        self.durable: dict[str, Node] = {}
        # Unsynced: None for a name that is gone.
        self.changed: dict[str, Node | None] = {}


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change does to one name: `node` appears there, or ceases to be there."""

    directory: Directory
    name: str
    node: Node
    appears: bool


Change = tuple[Effect, ...]


class Names:
    """All names, in memory."""

    def __init__(self) -> None:
        self.root = Directory()
        self.pending: list[Change] = []
        # The directories that `walk` has found, by path; empty after a change of any directory's name.
        self._walked: dict[str, Directory] = {}

    # Looking

    def get(self, directory: Directory, name: str) -> Node | None:
        if name in directory.changed:
            return directory.changed[name]
        return self._durable(directory, name)

    def listing(self, directory: Directory) -> list[str]:
        names = set(self._durable_names(directory)) - directory.changed.keys()
        return sorted(names | {name for name, node in directory.changed.items() if node is not None})

    def walk(self, path: str) -> Directory | None:
        directory = self._walked.get(path)
        if directory is None and (directory := self._find(path)) is not None:
            self._walked[path] = directory
        return directory

    def _find(self, path: str) -> Directory | None:
        directory = self.root
        for part in path.split("/"):
            if part:
                node = self.get(directory, part)
                if not isinstance(node, Directory):
                    return None
                directory = node
        return directory

    def files(self, path: str, directory: Directory) -> Iterator[tuple[str, FileNode]]:
        """Every file below a directory, with its path."""
        for name in self.listing(directory):
            node = self.get(directory, name)
            if isinstance(node, Directory):
                yield from self.files(f"{path}/{name}", node)
            elif isinstance(node, FileNode):
                yield f"{path}/{name}", node

    # Changing

    def make_file(self) -> FileNode:
        """A file without a name."""
        return FileNode(None, "", Content())

    def make_directory(self, parent: Directory, name: str) -> Directory:
        """Durable at once."""
        made = Directory(parent, name)
        self._put(parent, name, made)
        return made

    def change(self, change: Change) -> None:
        """Seen at once, durable when one of its directories is synced."""
        for effect in change:
            effect.directory.changed[effect.name] = effect.node if effect.appears else None
            if isinstance(effect.node, Directory):
                self._walked.clear()
        self.pending.append(change)

    def sync(self, directory: Directory) -> None:
        """The changes that concern a directory are durable, with those they build on."""
        nodes: set[Node] = set()
        committed: list[Change] = []
        rest: list[Change] = []
        for change in reversed(self.pending):
            for effect in change:
                if effect.directory is directory or effect.node in nodes:
                    nodes.update(effect.node for effect in change)
                    committed.append(change)
                    break
            else:
                rest.append(change)
        for change in reversed(committed):
            self._commit(change)
        self.pending = rest[::-1]
        self._show_pending(committed)

    def crash(self, rng: random.Random, keep: float) -> None:
        """Each unsynced change survives with the probability `keep`."""
        lost = self.pending
        self.pending = []
        for change in lost:
            if rng.random() < keep:
                self._commit(change)
        self._show_pending(lost)

    def forget(self) -> None:
        """Let go of all unsynced changes: they are another process's."""
        lost, self.pending = self.pending, []
        self._show_pending(lost)

    def _show_pending(self, done: list[Change]) -> None:
        for change in done:
            for effect in change:
                effect.directory.changed.clear()
                if isinstance(effect.node, Directory):
                    self._walked.clear()
        for change in self.pending:
            for effect in change:
                effect.directory.changed[effect.name] = effect.node if effect.appears else None

    def _commit(self, change: Change) -> None:
        # What appears first: a file that is renamed must not be without any name in between.
        for effect in sorted(change, key=lambda effect: not effect.appears):
            if effect.appears:
                self._put(effect.directory, effect.name, effect.node)
            elif self._durable(effect.directory, effect.name) is effect.node:
                self._take(effect.directory, effect.name, effect.node)

    # What is durable

    def _durable(self, directory: Directory, name: str) -> Node | None:
        return directory.durable.get(name)

    def _durable_names(self, directory: Directory) -> list[str]:
        return list(directory.durable)

    def _put(self, directory: Directory, name: str, node: Node) -> None:
        directory.durable[name] = node

    def _take(self, directory: Directory, name: str, node: Node) -> None:
        del directory.durable[name]


class RealNames(Names):
    """All names of the operating system's file tree, and this process's unsynced changes to them.

    A new file lies in `hidden`, a folder of its own on the same file system, until its name is durable.
    """

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self._hidden_path = hidden
        self._numbers = itertools.count(1)
        self._known: weakref.WeakValueDictionary[tuple[int, int], Node] = weakref.WeakValueDictionary()
        Path(hidden).mkdir(parents=True, exist_ok=True)
        for name in os.listdir(hidden):
            if not os.path.exists(f"/proc/{name.partition('-')[0]}"):
                os.unlink(os.path.join(hidden, name))
        found = self.walk(os.path.abspath(hidden))
        assert found is not None, f"{hidden} is not there"
        self._hidden = found

    def walk(self, path: str) -> Directory | None:
        return self._find(path)  # another process may have changed the names

    def make_file(self) -> FileNode:
        name = f"{os.getpid()}-{next(self._numbers)}"
        node = FileNode(self._hidden, name, Content(Platter(f"{self._hidden_path}/{name}", create=True)))
        self._remember(node)
        return node

    def make_directory(self, parent: Directory, name: str) -> Directory:
        try:
            os.mkdir(os.path.join(parent.real_path, name), 0o750)
        except FileExistsError:
            pass  # another process was first
        made = self._durable(parent, name)
        assert isinstance(made, Directory), f"{name} in {parent.real_path} is a file"
        return made

    def _remember(self, node: Node) -> None:
        found = os.lstat(node.real_path)
        self._known[found.st_dev, found.st_ino] = node

    def _durable(self, directory: Directory, name: str) -> Node | None:
        try:
            found = os.lstat(os.path.join(directory.real_path, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        kind = Directory if stat.S_ISDIR(found.st_mode) else FileNode
        node = self._known.get((found.st_dev, found.st_ino))
        if not isinstance(node, kind):  # of what was removed, perhaps, the number is given to the next
            node = self._known[found.st_dev, found.st_ino] = kind(directory, name)
        node.parent, node.name = directory, name
        return node

    def _durable_names(self, directory: Directory) -> list[str]:
        try:
            return os.listdir(directory.real_path)
        except FileNotFoundError:
            return []

    def _put(self, directory: Directory, name: str, node: Node) -> None:
        try:
            os.rename(node.real_path, os.path.join(directory.real_path, name))
        except FileNotFoundError:
            return  # its directory was removed meanwhile
        node.parent, node.name = directory, name

    def _take(self, directory: Directory, name: str, node: Node) -> None:
        # A process that was forked while the change was unsynced has it too, and may have committed it first.
        with contextlib.suppress(FileNotFoundError):
            if isinstance(node, Directory):
                shutil.rmtree(node.real_path)
                for number in [number for number, known in self._known.items() if known is node]:
                    del self._known[number]
            else:
                os.unlink(node.real_path)
