"""JSON bodies of requests about resources: decoded into a struct, with errors that name the field.

These bodies are small and their fields are fixed; bodies of records are read by
`laminar.http.api.append_body`.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from msgspec.inspect import Type

from laminar.http.api.problems import Problem
from laminar.http.api.routes import BODIES, Body
from laminar.http.protocol.messages import Request

_Document = TypeVar("_Document", bound=msgspec.Struct)

_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")

_BOUND = re.compile(r"(?:<=|>=) (?P<bound>-?[0-9]+)\Z")
_LENGTH = re.compile(r"Expected `(?P<kind>str|array|object)` of length (?P<order><=|>=) (?P<bound>[0-9]+)\Z")
_KIND = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<found>[^`]*)`\Z")
_NO_CHOICE = "Invalid enum value"

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_PARTS = {"str": "characters", "array": "items", "object": "members"}

MAX_DOCUMENT_BYTES = 1 << 20
# For prepares and commits, which list the stages of a partition, or all partitions of a batch.
MAX_COMMIT_BYTES = 5 << 20
# For operations that do not use a body.
MAX_NO_DOCUMENT_BYTES = 64 << 10
_MOST = (
    {operation: MAX_DOCUMENT_BYTES for operation, body in BODIES.items() if body is Body.JSON}
    | {operation: MAX_NO_DOCUMENT_BYTES for operation, body in BODIES.items() if body is Body.NONE}
    | {
        "prepare_stages": MAX_COMMIT_BYTES,
        "commit_batch": MAX_COMMIT_BYTES,
        "publish_upload": MAX_DOCUMENT_BYTES,
    }
)


def most_document_bytes(operation: str) -> int | None:
    """Return the maximum size of an operation's JSON body; None if its body is no JSON document.

    The size is bounded because the body is decoded on the event loop.
    """
    return _MOST.get(operation)


def json_body(request: Request, kind: type[_Document]) -> _Document:
    """Decode the body as `kind`; an empty body means all defaults.

    Raises:
        Problem: 400 if it is not JSON, 422 with the field's path and value if it does not fit `kind`.
    """
    body = bytes(request.body) or b"{}"
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            # Decoded again without a type, because the text after the first mismatch may not even be JSON.
            raise _invalid(str(error), msgspec.json.decode(body), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem("malformed", f"the body is not JSON: {error}", field="body") from error


def document_of(document: dict[str, Any], kind: type[_Document]) -> _Document:
    """Convert a document, which was decoded and then changed, to `kind`.

    Raises:
        Problem: 422 with the field's path and value if it does not fit `kind`.
    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), document, kind) from error


def _invalid(text: str, document: Any, kind: type[msgspec.Struct]) -> Problem:
    """Return msgspec's message `text` as a 422 problem: its path is `field`, with the `value` found there."""
    place = _PLACE.search(text)
    path = place["path"] if place is not None else ""
    text = text[: place.start()] if place is not None else text
    unknown = _UNKNOWN.fullmatch(text)
    if unknown is not None:
        name = unknown["name"]
        full = f"{path}.{name}" if path else name
        return Problem(
            "invalid",
            f"there is no field {full}",
            field=full,
            value=_at(document, f"{path}.{name}"),
            limit=_limit([each for each in _kind_at(kind, path) if isinstance(each, inspect.StructType)]),
        )
    kinds = _kind_at(kind, path)
    return Problem(
        "invalid",
        _detail(kinds, path, text),
        field=path or "body",
        value=_at(document, path),
        limit=_limit(kinds, text),
    )


def _detail(kinds: list[Type], path: str, text: str) -> str:
    """Return a sentence about the value at `path`; msgspec's message `text` where there is no better one."""
    name = path or "the body"
    if kind := _KIND.match(text):
        wanted = kind["wanted"].split(" | ")
        if kind["found"] in _KINDS and all(each in _KINDS for each in wanted):
            return (
                f"{name} must be {' or '.join(_KINDS[each] for each in wanted)}, not {_KINDS[kind['found']]}"
            )
    if length := _LENGTH.match(text):
        amount = "at most" if length["order"] == "<=" else "at least"
        return f"{name} must have {amount} {length['bound']} {_PARTS[length['kind']]}"
    if text.startswith(_NO_CHOICE) and (choices := _limit(kinds)) is not None:
        return f"{name} must be one of {choices}"
    if _BOUND.search(text):
        for each in kinds:
            match each:
                case inspect.IntType(ge=int(least), le=int(most)):
                    return f"{path} must be between {least} and {most}"
                case inspect.IntType(ge=int(least)):
                    return f"{path} must be at least {least}"
                case inspect.IntType(le=int(most)):
                    return f"{path} must be at most {most}"
    return text


def _kind_at(kind: type[msgspec.Struct], path: str) -> list[Type]:
    """Return the types, except null, that the struct `kind` permits at a path as msgspec writes it."""
    found = _alternatives(inspect.type_info(kind))
    for step in _STEP.findall(path):
        below: list[Type] = []
        for each in found:
            if isinstance(each, inspect.StructType):
                below += [field.type for field in each.fields if field.encode_name == step]
            elif isinstance(each, inspect.DictType):
                below.append(each.value_type)
            elif isinstance(each, inspect.ListType):
                below.append(each.item_type)
        found = [kind for each in below for kind in _alternatives(each)]
    return found


def _alternatives(kind: Type) -> list[Type]:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return (
        [part for each in kind.types for part in _alternatives(each)]
        if isinstance(kind, inspect.UnionType)
        else [kind]
    )


def _limit(kinds: list[Type], text: str = "") -> int | str | None:
    """Return the `limit` of a problem: the bound in `text`, the permitted names, a maximum or a pattern.

    Returns None if the types have none of these.
    """
    bound = _BOUND.search(text)
    if bound is not None:
        return int(bound["bound"])
    for kind in kinds:
        if isinstance(kind, inspect.StructType):
            return ", ".join(field.encode_name for field in kind.fields)
        if isinstance(kind, inspect.LiteralType):
            return ", ".join(map(str, kind.values))
        if isinstance(kind, inspect.IntType) and kind.le is not None:
            return kind.le
        if isinstance(kind, inspect.StrType) and kind.pattern is not None:
            return kind.pattern
    return None


def _at(document: Any, path: str) -> Any:
    """Return the value at a path as msgspec writes it; None if a step of the path is an index (`[...]`)."""
    if "[" in path:
        return None
    for step in path.split(".") if path else ():
        if not isinstance(document, dict) or step not in document:
            return None
        document = document[step]
    return document
