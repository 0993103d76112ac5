"""`laminar channel`: the channels of a topic, their settings, and their backlog."""

from __future__ import annotations

from time import time_ns
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.commands.topic import confirm, settings_of
from laminar.cli.errors import UsageError, complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing
from laminar.cli.times import moment

if TYPE_CHECKING:
    from laminar.client.descriptions import ChannelInfo

Topic = Annotated[str, Parameter(help="The topic's name.")]
Name = Annotated[str, Parameter(help="The channel's name.")]


def list_channels(topic: Topic, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """List the channels of a topic."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        found = client.topic(topic).channels()
    for each in found:
        warn(each)
    rows = [dict(each.raw) | {"oldest": age(each.raw), "paused": each.paused} for each in found]
    columns = ("channel", "depth", "out", "aside", "dead", "lost", "oldest", "blocked", "paused")
    show(rows, listing, columns=columns, name="channel")


def create(
    topic: Topic,
    name: Name,
    *,
    start: Annotated[
        str | None,
        Parameter(
            help="Where it begins: earliest, latest, -1h, a time as 2026-01-31T12:00:00Z, or cursor:NAME, "
            "where that cursor stands. [default: earliest]",
            allow_leading_hyphen=True,
        ),
    ] = None,
    until: Annotated[
        str | None,
        Parameter(
            help="Where it ends: now, -1h, or a time. [default: nowhere]",
            allow_leading_hyphen=True,
        ),
    ] = None,
    setting: Annotated[
        tuple[str, ...], Parameter(help="A setting, as NAME=VALUE; may be repeated.", negative="")
    ] = (),
    if_not_exists: Annotated[
        bool, Parameter(negative="", help="Do nothing if the channel exists with the same settings.")
    ] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Create a channel; return when it is open in all partitions."""
    settings = settings_of(setting)
    for option, text, read in (("start", start, start_of), ("until", until, until_of)):
        if text is not None:
            if option in settings:
                raise UsageError(f"--{option} and --setting {option}=... are mutually exclusive")
            settings[option] = read(text)
    with cluster.connect() as client:
        client.topic(topic).create_channel(name, settings=settings, exist_ok=if_not_exists)


def start_of(text: str) -> str | int | dict[str, str]:
    """Return the channel's setting `start` for the text of ``--start``. Raises `UsageError` if malformed."""
    if text in ("earliest", "latest"):
        return text
    kind, colon, name = text.partition(":")
    if kind == "cursor" and colon:
        return {"cursor": name}
    return _time_of("--start", text, "earliest, latest, -1h, cursor:NAME, or a time")


def until_of(text: str) -> int:
    """Return the setting `until` (ms since 1970) for the text of ``--until``. Raises `UsageError`."""
    return _time_of("--until", "-0s" if text == "now" else text, "now, -1h, or a time")


def _time_of(option: str, text: str, choice: str) -> int:
    """Return a time, absolute or relative to now as -1h, in ms since the epoch. Raises `UsageError`."""
    from laminar.client.consume.reader import start_parameter
    from laminar.client.errors import ConfigError

    try:
        if not text.startswith("-"):
            time = moment(option, text)
            assert time is not None
            return round(time.timestamp() * 1000)
        return int(start_parameter(text, now_ms=time_ns() // 1_000_000))
    except (UsageError, ConfigError):
        raise UsageError(f"{option} {text!r}: say {choice} with an offset, as 2030-01-31T12:00:00Z") from None


def describe(
    topic: Topic, name: Name, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER
) -> None:
    """Show a channel's settings and progress by partition. `-o names` gives the partitions' numbers."""
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        found = client.topic(topic).describe_channel(name)
    if listing.format == "json":
        show_json(dict(found.raw))
        return
    warn(found)
    if listing.format == "table":
        settings = "".join(f", {setting}={as_option(value)}" for setting, value in found.settings.items())
        print(f"{name} of {topic}: {found.depth:,} to be given out, {found.dead:,} dead{settings}")
    rows = [
        {"partition": int(number), "oldest": age(each)} | each
        for number, each in found.raw["partitions"].items()
    ]
    columns = (
        "partition",
        "next",
        "end",
        "depth",
        "out",
        "aside",
        "dead",
        "lost",
        "oldest",
        "blocked",
        "kept_bytes",
    )
    show(rows, listing, columns=columns, name="partition")


def as_option(value: object) -> str:
    """Return the value of a setting in the form that `--setting` takes."""
    import msgspec

    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def set_channel(
    topic: Topic,
    name: Name,
    *,
    setting: Annotated[
        tuple[str, ...],
        Parameter(
            help="A setting, as NAME=VALUE (NAME=null sets the default); may be repeated.", negative=""
        ),
    ] = (),
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Change settings of a channel; others stay. `start`, `until` and `order` never change."""
    if not setting:
        raise UsageError("say --setting NAME=VALUE")
    change(topic, name, settings_of(setting), cluster)


def pause(topic: Topic, name: Name, *, cluster: Cluster = ANY_CLUSTER) -> None:
    """Deliver no records of a channel; it still accepts acknowledgements, and deliveries still time out."""
    change(topic, name, {"paused": True}, cluster)


def resume(topic: Topic, name: Name, *, cluster: Cluster = ANY_CLUSTER) -> None:
    """Deliver the records of a channel again."""
    change(topic, name, {"paused": None}, cluster)


def delete(
    topic: Topic,
    name: Name,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Delete a channel and its state of each record, after asking. The records of the topic stay."""
    with cluster.connect() as client:
        handle = client.topic(topic)
        found = handle.describe_channel(name)  # raises no_such_channel
        if not yes:
            left = f"there are {found.depth:,} to be given out, and {found.dead:,} dead"
            confirm(f"delete channel {name} of topic {topic} ({left})?")
        handle.delete_channel(name)


def change(topic: str, name: str, settings: dict[str, Any], cluster: Cluster) -> None:
    """Change settings of a channel, and name the partitions that do not have them yet."""
    with cluster.connect() as client:
        found = client.topic(topic).set_channel(name, settings)
    warn(found)
    partitions = found.raw["partitions"].items()
    behind = [number for number, each in partitions if each["version"] < found.version]
    if behind:
        complain(f"partitions {', '.join(behind)} have the former settings yet, and will follow")


def warn(channel: ChannelInfo) -> None:
    """Warn of partitions that did not answer, and of those in which the channel is not open yet."""
    for numbers, what in ((channel.opening, "is not open yet"), (channel.unanswered, "has no answer")):
        if numbers:
            listed = ", ".join(map(str, numbers))
            complain(f"channel {channel.channel} {what} in partitions {listed}")


def age(figures: Any) -> str:
    """Return the age of the oldest record, for people; empty if there is none."""
    oldest_ms = figures["oldest_age_ms"]
    return "" if oldest_ms is None else f"{oldest_ms / 1000:,.0f} s"
