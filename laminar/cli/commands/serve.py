"""`laminar serve` and `laminar config`: run a node, with a flag for every setting, or show the settings.

The flags are made from `laminar.node.host.settings.SETTINGS`, so they cannot differ from the documented
settings. That module also merges flags, environment and file, and checks the values.
"""

from __future__ import annotations

import os
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from laminar.cli.errors import UsageError
from laminar.cli.options import AS_TABLE, Listing
from laminar.node.host.settings import SETTINGS, Setting, SettingsError, as_written
from laminar.node.host.settings_sources import Loaded, load

GROUP = Group("Settings", sort_key=2)


def _flag(setting: Setting) -> Any:
    """Return the type of a setting's flag: its text is read by `load`, which names the flag on an error."""
    kind: Any = tuple[str, ...] if setting.kind is tuple else bool if setting.kind is bool else str
    default = "none" if setting.default in ("", ()) else as_written(setting.default)
    wording = f"{setting.help}. [{setting.variable}; default: {default}]"
    return Annotated[kind | None, Parameter(name=setting.flag, help=wording, negative="", show_default=False)]


if TYPE_CHECKING:

    class Flags:
        """A field for each setting, None if it was not given."""

else:
    Flags = Parameter(name="*", group=GROUP)(
        make_dataclass(
            "Flags",
            [(row.name, _flag(row), field(default=None)) for row in SETTINGS],
            frozen=True,
            kw_only=True,
            namespace={
                "__module__": __name__
            },  # otherwise it would be `types`, and cyclopts would not treat the class as a user's
        )
    )

Config = Annotated[Path | None, Parameter(help="A TOML file of settings, as NAME = VALUE.")]
_NONE_GIVEN = Flags()


def loaded(flags: Flags, config: Path | None) -> Loaded:
    """Return the settings from all sources. Raises UsageError for an unknown setting or a wrong value."""
    try:
        return load(config=config, environ=os.environ, flags=vars(flags))
    except SettingsError as error:
        raise UsageError(str(error)) from None


def serve(*, config: Config = None, flags: Flags = _NONE_GIVEN) -> int:
    """Run a node until SIGTERM or Ctrl-C; a second one ends it at once."""
    settings = loaded(flags, config).settings
    from laminar.node.start import serve as run_node

    return run_node(settings)


def show_config(
    *,
    config: Config = None,
    origin: Annotated[bool, Parameter(negative="", help="Say where each value comes from.")] = False,
    flags: Flags = _NONE_GIVEN,
    listing: Listing = AS_TABLE,
) -> None:
    """Show every setting, with its value or its fault."""
    from laminar.cli.output import show

    found = loaded(flags, config)
    rows = []
    for setting in SETTINGS:
        value = getattr(found.settings, setting.name)
        if setting.name == "secret":
            value = "set" if value else ""
        if isinstance(value, int | float):
            value = as_written(value)
        rows.append({"setting": setting.name, "value": value, "origin": found.origins[setting.name]})
    columns = ("setting", "value", "origin") if origin else ("setting", "value")
    show(rows, listing, columns=columns, name="setting")
