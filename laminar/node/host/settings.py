"""Every setting of a node: one struct, its limits, and the rules between several settings.

A field of `Settings` has its description and limits beside its type; `SETTINGS` is the table of them from
which documentation, flags and tests are made. `laminar.node.host.settings_sources` loads them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from laminar.http.api.documents.shared import MAX_REPLICAS
from laminar.log.format.settings import StorageSettings
from laminar.node.secret.keyring import SHORTEST

DEFAULT_PORT = 7070
TOKENS, OPEN = "tokens", "open"
"""The values of the setting `access`."""
_MI = 1 << 20
_HOUR_MS = 3_600_000
_OF_STORAGE = StorageSettings()


class SettingsError(ValueError):
    """A setting can't be used. `.name` is the setting (or the unknown name), `.origin` where it came from."""

    def __init__(self, message: str, *, name: str, origin: str = "") -> None:
        super().__init__(f"{origin}: {message}" if origin else message)
        self.name = name
        self.origin = origin


def _about(
    description: str,
    low: float | None = None,
    high: float | None = None,
    *,
    check: Callable[[Any], str] = lambda value: "",
) -> Meta:
    """Return the annotation of a field of `Settings`: its description, and its limits or another check.

    `check(value)` returns what is wrong with a value, or "".
    """
    if low is None or high is None:
        return Meta(description=description, extra={"check": check})
    return Meta(description=description, ge=low, le=high, extra={"check": _between(low, high)})


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of a node. Made by `settings_sources.load`, which checks limits, or directly in tests."""

    data: Annotated[
        str, _about("the data folder; made on the first start, and locked while the node runs")
    ] = "laminar-data"
    node: Annotated[
        str,
        _about(
            "the node's name, unique in the cluster; if empty, the first start draws one, and it is kept",
            check=_node_name,
        ),
    ] = ""
    host: Annotated[
        str,
        _about(
            "address that every socket binds to; an address that is not loopback needs `secret`, and "
            "`tls_certificate` or `insecure`"
        ),
    ] = "127.0.0.1"
    advertise_host: Annotated[
        str,
        _about(
            "host name or address by which other nodes and clients reach this node; empty: `host`; needed "
            "for 0.0.0.0"
        ),
    ] = ""
    gossip_host: Annotated[
        str,
        _about(
            "IP address that other nodes send gossip to; empty: `advertise_host`, or `host` if "
            "`advertise_host` is a name",
            check=_address,
        ),
    ] = ""
    port: Annotated[
        int,
        _about(
            "the HTTP port that all shards share; shard k also has port+1+k of its own; other nodes reach "
            "the controller on port+100 (TCP, and UDP for gossip), and shard k on port+101+k; 0: any free "
            "ports, kept for the next start",
            0,
            65_000,
        ),
    ] = DEFAULT_PORT
    shards: Annotated[
        int, _about("number of shards, each a process with an event loop; 0: one for each CPU", 0, 64)
    ] = 0
    join: Annotated[
        tuple[str, ...],
        _about(
            "HTTP addresses (HOST:PORT) of nodes of the cluster to join; without it an empty data "
            "folder makes a new cluster",
            check=_seeds,
        ),
    ] = ()
    secret: Annotated[
        str, _about("the secret that all nodes of the cluster share, 16 characters or more", check=_secret)
    ] = ""
    secret_file: Annotated[
        str,
        _about(
            "a file with the secret, in place of `secret`; a secret on its second line is accepted, too, "
            "during a change of the secret",
        ),
    ] = ""
    access: Annotated[
        str,
        _about(
            "who may use the HTTP API: tokens (each request needs a token; the first one is in the file "
            "admin-token of the data folder), or open (every client that reaches the port may do everything)",
            check=_one_of(TOKENS, OPEN),
        ),
    ] = "tokens"
    insecure: Annotated[
        bool,
        _about(
            "open the HTTP ports to other machines without tokens or without TLS; each start logs which of "
            "them is missing"
        ),
    ] = False
    tls_certificate: Annotated[
        str,
        _about(
            "PEM file of the node's certificate, followed by intermediate CAs; with it all ports for HTTP "
            "and for other nodes speak TLS"
        ),
    ] = ""
    tls_key: Annotated[str, _about("PEM file of the certificate's key, without a password")] = ""
    tls_ca: Annotated[
        str,
        _about("PEM file of the CAs that sign the certificates of other nodes and of clients"),
    ] = ""
    hosts: Annotated[
        tuple[str, ...],
        _about(
            "host names that HTTP requests may use for this node, beside `host`, `advertise_host`, the "
            "machine's name, localhost and IP addresses; .NAME is any name below NAME",
            check=_names,
        ),
    ] = ()
    origins: Annotated[
        tuple[str, ...],
        _about(
            "web sites (SCHEME://HOST[:PORT]) whose pages may use the HTTP API, beside the node itself",
            check=_origins,
        ),
    ] = ()
    console: Annotated[
        str, _about("serve the web console at /console/: on, or off", check=_one_of("on", "off"))
    ] = "on"
    weight: Annotated[
        float, _about("share of replicas that this node gets, relative to other nodes", 0.01, 1000.0)
    ] = 1.0
    zone: Annotated[
        str,
        _about(
            "failure domain of this node (rack, room, region); replicas are spread over zones; empty: none",
            check=_zone,
        ),
    ] = ""
    pin: Annotated[
        str,
        _about(
            "pin each shard to a CPU: auto (if there are enough CPUs, and no other node uses them), on, off",
            check=_one_of("auto", "on", "off"),
        ),
    ] = "auto"
    steer: Annotated[
        str,
        _about(
            "steer packets to the CPU of their shard by XDP: auto (if this machine can, and host is not on "
            "the loopback), require (or don't start), off",
            check=_one_of("auto", "require", "off"),
        ),
    ] = "auto"
    drain_ms: Annotated[
        int, _about("time that a stop may take before the processes of the node are killed", 0, 600_000)
    ] = 10_000
    log_level: Annotated[
        str,
        _about(
            "the lowest level that is logged: debug, info, warning or error",
            check=_one_of("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        str,
        _about(
            "format of the log: text, json, or auto (text on a terminal, json elsewhere)",
            check=_one_of("auto", "text", "json"),
        ),
    ] = "auto"
    election_timeout_ms: Annotated[
        int,
        _about(
            "time without a leader after which a follower begins an election (up to twice that)", 50, 60_000
        ),
    ] = 1500
    heartbeat_ms: Annotated[int, _about("interval of an idle leader's heartbeats", 10, 10_000)] = 200
    segment_size_bytes: Annotated[int, _about("size at which a new segment begins", _MI, 4096 * _MI)] = (
        _OF_STORAGE.segment_size_bytes
    )
    journal_file_bytes: Annotated[int, _about("size at which a new journal file begins", _MI, 4096 * _MI)] = (
        _OF_STORAGE.journal_file_bytes
    )
    scrub_bytes_per_s: Annotated[
        int,
        _about("how fast each shard reads segments again, to find damage (scrubbing)", _MI // 16, 4096 * _MI),
    ] = _OF_STORAGE.scrub_bytes_per_s
    search_bytes_per_s: Annotated[
        int, _about("how fast each shard reads records for searches", _MI // 16, 4096 * _MI)
    ] = 64 * _MI
    find_bytes_per_s: Annotated[
        int,
        _about(
            "how fast each shard reads sealed segments to build key indexes of them", _MI // 16, 4096 * _MI
        ),
    ] = 32 * _MI
    catch_up_bytes_per_s: Annotated[
        int, _about("how fast each shard serves replicas that need whole segments", _MI // 16, 4096 * _MI)
    ] = 32 * _MI
    catch_up_bytes: Annotated[
        int,
        _about(
            "a replica that lacks this many bytes of a partition, and more than half of it, gets whole "
            "segments; a new replica from 4 MiB on",
            _MI // 64,
            1 << 40,
        ),
    ] = 64 * _MI
    replace_after_ms: Annotated[
        int,
        _about(
            "how long a node is dead before its replicas are replaced on other nodes; 0: never automatically",
            0,
            30 * 24 * _HOUR_MS,
        ),
    ] = 10 * 60_000
    settle_ms: Annotated[
        int,
        _about(
            "how long a node must be alive without a break before it gets replicas and leaders",
            0,
            24 * _HOUR_MS,
        ),
    ] = 5_000
    balance_threshold: Annotated[
        float,
        _about(
            "score of a node (its largest share of a load, 1 is fair) above which leaders, then replicas, "
            "move to other nodes; 0: never, and loads are not measured; must be the same on every node",
            check=_threshold,
        ),
    ] = 0.0
    balance_hours: Annotated[
        str,
        _about(
            "hours of the day (UTC) in which balance by load may act, such as 22-06; empty: all",
            check=_hours,
        ),
    ] = ""
    max_partitions: Annotated[
        int,
        _about(
            "largest number of partitions of all topics of the cluster; the catalog's leader refuses more",
            1,
            1_000_000,
        ),
    ] = 10_000
    max_job_streams: Annotated[
        int,
        _about(
            "largest number of job streams (server-sent events) that each shard serves at a time", 1, 100_000
        ),
    ] = 1_000
    max_append_bytes: Annotated[int, _about("largest body of one append", 1024, 32 * _MI)] = 16 * _MI
    max_upload_bytes: Annotated[
        int,
        _about("largest size of all unfinished uploads of one partition, so also of a record", _MI, 1 << 50),
    ] = 64 * 1024 * _MI
    retention_check_ms: Annotated[
        int, _about("how often leaders look for records to delete", 10, 24 * _HOUR_MS)
    ] = 30_000
    retention_hold_ms: Annotated[
        int,
        _about(
            "how long records are kept beyond their retention for a replica that lacks them",
            0,
            30 * 24 * _HOUR_MS,
        ),
    ] = 24 * _HOUR_MS
    low_water_bytes: Annotated[
        int,
        _about(
            "appends are refused while the data folder's disk has less free space than this, or than "
            "low_water_percent, whichever is less; consumers are refused below half of that",
            0,
            1 << 50,
        ),
    ] = 2048 * _MI
    low_water_percent: Annotated[float, _about("see low_water_bytes", 0.0, 50.0)] = 5.0
    trash_ms: Annotated[
        int,
        _about(
            "how long the files of deleted topics and replaced logs are kept in the trash",
            0,
            365 * 24 * _HOUR_MS,
        ),
    ] = 24 * _HOUR_MS
    default_replicas: Annotated[
        int,
        _about(
            "number of replicas of `_transactions`, `_audit`, `_trace`, and of topics that are created "
            "without one; must be the same on every node",
            1,
            MAX_REPLICAS,
        ),
    ] = 3

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["secret"] = "set" if self.secret else "not set"
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def tls(self) -> bool:
        """Whether HTTP and the connections of nodes are encrypted."""
        return bool(self.tls_certificate)

    @property
    def scheme(self) -> str:
        """The scheme of the node's URLs."""
        return "https" if self.tls else "http"

    @property
    def lacks(self) -> list[str]:
        """The protections of the HTTP ports from other machines that are not set, as a text for each."""
        found = []
        if self.access == "open":
            found.append("HTTP clients need no token (access)")
        if not self.tls:
            found.append("HTTP is not encrypted (tls_certificate)")
        return found

    @property
    def is_insecure(self) -> bool:
        """Whether other machines can reach the HTTP ports although a protection is missing (`lacks`)."""
        return not is_loopback(self.host) and bool(self.lacks)

    @property
    def of_storage(self) -> StorageSettings:
        """The settings for this node's `Storage`; those that the node does not have keep their defaults."""
        return StorageSettings(
            segment_size_bytes=self.segment_size_bytes,
            journal_file_bytes=self.journal_file_bytes,
            scrub_bytes_per_s=self.scrub_bytes_per_s,
        )

    @property
    def public_host(self) -> str:
        """The host that other nodes and clients are given."""
        return self.advertise_host or self.host


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of `Settings`. `check(value)` returns what is wrong with a value, or ""."""

    name: str
    kind: type
    help: str
    check: Callable[[Any], str] = lambda value: ""

    @property
    def default(self) -> Any:
        """The default: the value if no source sets another."""
        return getattr(Settings(), self.name)

    @property
    def variable(self) -> str:
        """The name of the environment variable that sets it."""
        return f"LAMINAR_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The command-line flag that sets it."""
        return f"--{self.name.replace('_', '-')}"


def _between(low: float, high: float) -> Callable[[Any], str]:
    def check(value: float) -> str:
        return "" if low <= value <= high else f"must be between {low:,} and {high:,}"

    return check


def _one_of(*choices: str) -> Callable[[Any], str]:
    return lambda value: "" if value in choices else f"must be one of {', '.join(choices)}"


def _node_name(value: str) -> str:
    fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value) or not value
    return (
        "" if fits else "must be 1 to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit"
    )


def _address(value: str) -> str:
    try:
        fits = not value or not ipaddress.ip_address(value).is_unspecified
    except ValueError:
        fits = False
    return "" if fits else "must be an IP address"


def _zone(value: str) -> str:
    fits = re.fullmatch(r"[A-Za-z0-9._/-]{0,200}", value)
    return "" if fits else "must be at most 200 letters, digits, '.', '_', '/' or '-'"


def _threshold(value: float) -> str:
    return "" if value == 0 or 1.1 <= value <= 100 else "must be 0, or between 1.1 and 100"


def _hours(value: str) -> str:
    fits = re.fullmatch(r"([01][0-9]|2[0-3])-([01][0-9]|2[0-3])", value) or not value
    return "" if fits else "must be two hours of 00 to 23, such as 22-06"


def _seeds(value: tuple[str, ...]) -> str:
    for seed in value:
        host, colon, port = seed.rpartition(":")
        if "//" in seed:
            return f"must be a list of HOST:PORT or http[s]://HOST:PORT, not {seed!r}"
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
            return f"must be a list of HOST:PORT, not {seed!r}"
    return ""


def _names(value: tuple[str, ...]) -> str:
    for name in value:
        if re.fullmatch(r"\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name) is None:
            return f"must be a list of names without ports, not {name!r}"
    return ""


def _origins(value: tuple[str, ...]) -> str:
    for origin in value:
        if re.fullmatch(r"https?://[^/\s]+", origin) is None:
            return f"must be a list of SCHEME://HOST[:PORT], not {origin!r}"
    return ""


def _secret(value: str) -> str:
    return "" if not value or len(value) >= SHORTEST else f"must have at least {SHORTEST} characters"


def _rows() -> Iterator[Setting]:
    hints = get_type_hints(Settings, include_extras=True)
    for name in Settings.__struct_fields__:
        kind, meta = get_args(hints[name])
        yield Setting(name, get_origin(kind) or kind, meta.description, meta.extra["check"])


SETTINGS: tuple[Setting, ...] = tuple(_rows())


def as_written(value: object) -> str:
    """Return a setting's value as a file of settings has it: `true`, `16777216`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_together(settings: Settings) -> None:
    """Check the rules between several settings.

    Raises:
        SettingsError: one of the rules is broken.
    """
    if settings.election_timeout_ms < 3 * settings.heartbeat_ms:
        raise SettingsError(
            f"election_timeout_ms ({settings.election_timeout_ms}) must be at least three times heartbeat_ms "
            f"({settings.heartbeat_ms})",
            name="election_timeout_ms",
        )
    files = {name: getattr(settings, name) for name in ("tls_certificate", "tls_key", "tls_ca")}
    missing = [name for name, path in files.items() if not path]
    if missing and len(missing) < len(files):
        given = " and ".join(name for name in files if name not in missing)
        raise SettingsError(
            f"{given} without {' and '.join(missing)}: TLS needs all three files", name=missing[0]
        )
    if not settings.secret and not is_loopback(settings.host):
        raise SettingsError(
            f"host {settings.host} can be reached by others, and no secret is set: set LAMINAR_SECRET to the "
            "same 16 or more characters on every node, or use host 127.0.0.1",
            name="host",
        )
    fault = fault_of_open_http(settings)
    if fault:
        raise SettingsError(fault, name="host")
    if settings.public_host in ("0.0.0.0", "::"):
        raise SettingsError(
            f"others can't connect to {settings.host}: set advertise_host to this machine's address",
            name="advertise_host",
        )


def fault_of_open_http(settings: Settings) -> str:
    """Return why the HTTP ports may not be opened with these settings; "" if they may."""
    if not settings.is_insecure or settings.insecure:
        return ""
    return (
        f"host {settings.host} can be reached by others, and {' and '.join(settings.lacks)}: set that, or "
        "use host 127.0.0.1, or set insecure (--insecure, LAMINAR_INSECURE=true) if every machine that can "
        "reach this host, or the network between, may read, write and delete everything"
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`.

    False for a name other than localhost.
    """
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None
