"""Loads a node's settings from their sources.

Sources, the later one wins: defaults, a TOML file, `LAMINAR_*` environment variables, command-line flags. An
unknown name is an error with a suggestion, in each of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from laminar.node.host.settings import SETTINGS, Settings, SettingsError, check_together
from laminar.node.secret.keyring import SecretFileError, read_secrets

# Variables with our prefix that are not settings of a node: they are the client's, the command line's or
# the tests'.
_OTHER_VARIABLES = frozenset(
    {
        *("LAMINAR_URL", "LAMINAR_TOKEN", "LAMINAR_TOKEN_FILE", "LAMINAR_CA", "LAMINAR_CERTIFICATE"),
        "LAMINAR_KEY",
        *("LAMINAR_CONTEXT", "LAMINAR_CONFIG", "LAMINAR_KERNEL_HEADERS"),
    }
)
_OTHER_PREFIXES = ("LAMINAR_TEST_", "LAMINAR_BENCH_")

_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
    bool: "true or false",
}
_TABLE = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded settings, and the origin of each value: `default`, a file's path, a variable or a flag."""

    settings: Settings
    origins: dict[str, str]


def load(
    *,
    config: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Return the settings from all sources. `flags` has values by setting name; None is a flag not given.

    Raises:
        SettingsError: a value or name can't be used; its text is fit to be printed.
    """
    values: dict[str, Any] = {}
    origins = {setting.name: "default" for setting in SETTINGS}
    for name, raw, origin in [
        *_from_file(config),
        *_from_environment(environ or {}),
        *_from_flags(flags or {}),
    ]:
        values[name] = convert(name, raw, origin=origin)
        origins[name] = origin
    settings = with_secret_of_file(Settings(**values))
    check_together(settings)
    return Loaded(settings, origins)


def with_secret_of_file(settings: Settings) -> Settings:
    """Return the settings with the first secret that the file `secret_file` has, if that is set.

    Raises:
        SettingsError: the file can't be read, has no secret, or `secret` is set too.
    """
    path = settings.secret_file
    if not path:
        return settings
    if settings.secret:
        raise SettingsError("set either secret or secret_file", name="secret_file")
    try:
        secrets = read_secrets(path)
    except SecretFileError as error:
        raise SettingsError(f"secret_file {path} {error}", name="secret_file") from error
    return msgspec.structs.replace(settings, secret=secrets[0])


def convert(name: str, raw: object, *, origin: str) -> Any:
    """Return the value of a known setting from the `raw` one of a source; text is parsed as its type.

    `origin` names the source in the error.

    Raises:
        SettingsError: the value is of another type, or outside of its limits.
    """
    setting = _TABLE[name]
    if setting.kind is tuple:
        # From a file it is a list, from flags one item for each flag, from a variable one text. Each item may
        # itself be a list with commas.
        raw = [raw] if isinstance(raw, str) else raw
        if isinstance(raw, list | tuple) and all(isinstance(each, str) for each in raw):
            raw = tuple(part.strip().rstrip("/") for each in raw for part in each.split(",") if part.strip())
            if name == "join":
                # A node's URL may stand for its HOST:PORT. The own settings say whether it speaks TLS.
                raw = tuple(part.removeprefix("http://").removeprefix("https://") for part in raw)
    target = tuple[str, ...] if setting.kind is tuple else setting.kind
    shown = "" if name == "secret" else f" (it is {raw!r})"
    try:
        if isinstance(raw, bool) and setting.kind is not bool:
            raise msgspec.ValidationError("this setting is not true or false")
        value: Any = msgspec.convert(raw, target, strict=not isinstance(raw, str))
    except msgspec.ValidationError:
        raise SettingsError(
            f"{name} must be {_KINDS[setting.kind]}{shown}", name=name, origin=origin
        ) from None
    wrong = setting.check(value)
    if wrong:
        raise SettingsError(f"{name} {wrong}{shown}", name=name, origin=origin)
    return value


def _unknown(name: str, origin: str, *, shown: str, candidates: Mapping[str, str]) -> SettingsError:
    import difflib  # with `tomllib` below 5 ms of each start, of nodes without a file, too

    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    hint = f"; did you mean {candidates[close[0]]}?" if close else ""
    return SettingsError(f"unknown setting {shown}{hint}", name=name, origin=origin)


def _from_file(config: str | os.PathLike[str] | None) -> list[tuple[str, object, str]]:
    if config is None:
        return []
    import tomllib

    origin = os.fspath(config)
    try:
        document = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"can't be read: {error}", name="config", origin=origin) from error
    for name in document:
        if name not in _TABLE:
            raise _unknown(
                name, origin, shown=repr(name), candidates={known: repr(known) for known in _TABLE}
            )
    return [(name, raw, origin) for name, raw in document.items()]


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, object, str]]:
    names = {setting.variable: setting.name for setting in SETTINGS}
    found: list[tuple[str, object, str]] = []
    for variable, text in environ.items():
        if variable in names:
            found.append((names[variable], text, variable))
            continue
        others = variable in _OTHER_VARIABLES or variable.startswith(_OTHER_PREFIXES)
        if variable.startswith("LAMINAR_") and not others:
            candidates = {known: known for known in names}
            raise _unknown(variable, "environment", shown=variable, candidates=candidates)
    return found


def _from_flags(flags: Mapping[str, Any]) -> list[tuple[str, object, str]]:
    for name in flags:
        if name not in _TABLE:
            candidates = {known: setting.flag for known, setting in _TABLE.items()}
            raise _unknown(name, "command line", shown=f"--{name.replace('_', '-')}", candidates=candidates)
    return [(name, value, _TABLE[name].flag) for name, value in flags.items() if value is not None]
