"""Buffers that are not zeroed first, for bytes that a system call fills at once.

`bytearray(size)` writes zeros, which takes as long as reading or receiving the bytes. No one may see such a
buffer before all of it is filled: it contains whatever was in that memory before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# Below this, zeroing costs less than the call through the C API.
_ZEROED_BYTES = 32 * 1024

# The C API's own function, with types of this module's: those of `ctypes.pythonapi` belong to the process.
_new: Callable[[None, int], bytearray] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t
)(("PyByteArray_FromStringAndSize", ctypes.pythonapi))


def new_bytearray(size: int) -> bytearray:
    """Return a bytearray of `size` bytes with arbitrary content. Raises `MemoryError` if there is no room."""
    return bytearray(size) if size < _ZEROED_BYTES else _new(None, size)
