"""A writer and a reader of FlatBuffers, as far as Arrow's messages need them: tables, strings, vectors.

The writer also returns the positions of all numbers: so a caller can keep a message as a template and write
other numbers into it. The reader checks every position; a wrong one raises `BatchError`. Nothing here knows
Arrow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from laminar.batch.header import BatchError

_SIZES = {"B": 1, "?": 1, "h": 2, "i": 4, "q": 8}
_UNSIGNED = struct.Struct("<I")
_SIGNED = struct.Struct("<i")
_SHORT = struct.Struct("<H")


class Scalar:
    """A number in a table; `form` is its format character for the module `struct`."""

    __slots__ = ("form", "number")

    def __init__(self, form: str, number: int | bool) -> None:
        self.form = form
        self.number = number


class Structs:
    """A vector of `count` structs, already packed in `data` and aligned to 8 bytes."""

    __slots__ = ("count", "data")

    def __init__(self, count: int, data: bytes) -> None:
        self.count = count
        self.data = data


class Table:
    """A table: the values of its fields, by their slots in the schema; None for a field that is left out."""

    __slots__ = ("slots",)

    def __init__(self, *slots: Node | Scalar | None) -> None:
        self.slots = slots


Node = Table | Structs | str | Sequence[Table]


def encode(root: Table) -> tuple[bytearray, list[dict[int, int]]]:
    """Return the encoded buffer, and for each object in it the positions of its fields, by slot.

    Positions are in bytes from the start of the buffer, which is padded to 8 bytes. Objects are listed
    breadth first from the root. Of a vector or a text only the position of its first element is given, as
    slot 0.
    """
    out = bytearray(4)
    places: list[dict[int, int]] = []
    waiting: list[tuple[int, Node]] = [(0, root)]
    for reference_at, node in waiting:
        if isinstance(node, Table):
            position = _put_table(out, node, places, waiting)
        elif isinstance(node, Structs):
            out += bytes((-len(out) - 4) % 8)
            position = len(out)
            places.append({0: position + 4})
            out += _UNSIGNED.pack(node.count) + node.data
        else:
            out += bytes(-len(out) % 4)
            position = len(out)
            places.append({0: position + 4})
            out += _UNSIGNED.pack(len(node.encode()) if isinstance(node, str) else len(node))
            if isinstance(node, str):
                out += node.encode() + b"\0"
            else:
                waiting += [(len(out) + 4 * i, table) for i, table in enumerate(node)]
                out += bytes(4 * len(node))
        _UNSIGNED.pack_into(out, reference_at, position - reference_at)
    out += bytes(-len(out) % 8)
    return out, places


def _put_table(
    out: bytearray, table: Table, places: list[dict[int, int]], waiting: list[tuple[int, Node]]
) -> int:
    vtable_size = 4 + 2 * len(table.slots)
    out += bytes(-(len(out) + vtable_size) % 8)
    position = len(out) + vtable_size
    vtable = [0] * len(table.slots)
    inline = bytearray(_SIGNED.pack(vtable_size))
    for slot, field in enumerate(table.slots):
        if field is None:
            continue
        form = field.form if isinstance(field, Scalar) else "i"
        inline += bytes(-len(inline) % _SIZES[form])
        vtable[slot] = len(inline)
        if isinstance(field, Scalar):
            inline += struct.pack("<" + form, field.number)
        else:
            waiting.append((position + len(inline), field))
            inline += bytes(4)
    out += struct.pack(f"<{2 + len(vtable)}H", vtable_size, len(inline), *vtable)
    out += inline
    places.append({slot: position + at for slot, at in enumerate(vtable) if at})
    return position


class Reader:
    """A reader of one table in an untrusted buffer. Its methods raise `BatchError` for wrong positions."""

    __slots__ = ("_buffer", "_position", "_vtable")

    def __init__(self, buffer: memoryview, position: int) -> None:
        self._buffer = buffer
        self._position = position
        vtable = position - self._number(_SIGNED, position)
        size = self._number(_SHORT, vtable)
        self._vtable = [self._number(_SHORT, at) for at in range(vtable + 4, vtable + size, 2)]

    @classmethod
    def root(cls, buffer: memoryview) -> Reader:
        """Return a reader of the root table of a buffer."""
        return cls(buffer, _checked(_UNSIGNED, buffer, 0))

    def _number(self, form: struct.Struct, position: int) -> int:
        return _checked(form, self._buffer, position)

    def _place(self, slot: int) -> int | None:
        found = self._vtable[slot] if slot < len(self._vtable) else 0
        return self._position + found if found else None

    def scalar(self, slot: int, form: str, default: Any = 0) -> Any:
        """Return the number in a slot; if the field is left out, `default`, which should be the schema's.

        `form` is the number's format character in `struct`.
        """
        place = self._place(slot)
        return default if place is None else _checked(struct.Struct("<" + form), self._buffer, place)

    def _target(self, slot: int) -> int | None:
        place = self._place(slot)
        return None if place is None else place + self._number(_UNSIGNED, place)

    def table(self, slot: int) -> Reader | None:
        """Return a reader of the table in a slot; None if the field is left out."""
        target = self._target(slot)
        return None if target is None else Reader(self._buffer, target)

    def _vector(self, slot: int, width: int) -> tuple[int, int]:
        """Return (position of the first element, number of elements) of a vector; (0, 0) if not written.

        Elements have `width` bytes each; all of them are inside the buffer.
        """
        target = self._target(slot)
        if target is None:
            return 0, 0
        count = self._number(_UNSIGNED, target)
        if count * width > len(self._buffer) - target - 4:
            raise _outside(target + 4 + count * width, len(self._buffer))
        return target + 4, count

    def string(self, slot: int) -> str | None:
        """Return the text in a slot; None if it is left out. Raises `BatchError` if it is not UTF-8."""
        start, length = self._vector(slot, 1)
        if not start:
            return None
        try:
            return str(self._buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise BatchError("malformed", f"message: {error}", field="string") from None

    def tables(self, slot: int) -> list[Reader]:
        """Return readers of the tables in the vector of a slot; [] if the field is left out."""
        start, count = self._vector(slot, 4)
        places = range(start, start + 4 * count, 4)
        return [Reader(self._buffer, place + self._number(_UNSIGNED, place)) for place in places]

    def structs(self, slot: int, form: str) -> Iterator[tuple[Any, ...]]:
        """Return the elements of the vector of structs in a slot, unpacked by `struct`'s format `form`."""
        width = struct.calcsize(form)
        start, count = self._vector(slot, width)
        return struct.iter_unpack(form, self._buffer[start : start + width * count])


def _checked(form: struct.Struct, buffer: memoryview, position: int) -> int:
    # `unpack_from` counts a negative position from the end; here it is an error.
    if not 0 <= position <= len(buffer) - form.size:
        raise _outside(position, len(buffer))
    number: int = form.unpack_from(buffer, position)[0]
    return number


def _outside(position: int, size: int) -> BatchError:
    return BatchError(
        "malformed",
        f"message: position {position} lies outside of its {size} bytes",
        field="metadata",
        value=position,
        limit=size,
    )
