"""Codecs: the conversion between a topic's values (bytes) and the objects of the program.

A codec is a pair of plain functions. Without one values are bytes and nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import msgspec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """A pair of functions: ``encode`` to bytes and ``decode`` from bytes. Their errors reach the caller."""

    name: str
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def not_bytes(value: object) -> TypeError | None:
    """Return the error for a value that is not bytes; None for a value that a batch can hold.

    Callers check each value when the program passes it: an error found only when the batch is built would
    fail the other records of that batch too.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return None
    kind = type(value).__name__
    return TypeError(f"a value is bytes, not {kind}: encode it, or give the topic a codec (laminar.json())")


@overload
def json(kind: type[T]) -> Codec[T]: ...
@overload
def json() -> Codec[Any]: ...
def json(kind: Any = Any) -> Codec[Any]:
    """Return a codec for JSON values of type `kind`: a Struct, dataclass or other type msgspec supports.

    A value that does not fit the type raises `msgspec.ValidationError` (a ValueError) when read.
    """
    decoder = msgspec.json.Decoder(kind)
    return Codec("json", msgspec.json.Encoder().encode, decoder.decode)
