"""Settings: where they come from, which wins, and what is refused with which words."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from laminar.node.host.machine import default_shards, shards_of_this_machine
from laminar.node.host.settings import SETTINGS, Setting, Settings, SettingsError, is_loopback
from laminar.node.host.settings_sources import convert, load
from laminar.node.runtime.data_folder import open_data_folder
from laminar.node.runtime.environment import Environment
from laminar.node.start import open_sockets_of


def write(path: Path, text: str) -> Path:
    """A TOML file."""
    path.write_text(text)
    return path


def test_the_table_names_every_setting_once_and_explains_it() -> None:
    """One table documents, checks and tests all settings; the struct has the same names."""
    assert list(Settings.__struct_fields__) == [setting.name for setting in SETTINGS]
    assert all(setting.help and isinstance(setting.default, setting.kind) for setting in SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: str(setting.name))
def test_every_default_passes_its_own_check(setting: Setting) -> None:
    """Nobody is refused for what he did not set."""
    assert setting.check(setting.default) == ""


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    """And `origins` says which it was."""
    config = write(tmp_path / "l.toml", 'port = 1001\nshards = 3\nweight = 2\njoin = ["a:7070"]\n')

    loaded = load(
        config=config,
        environ={"LAMINAR_PORT": "1002", "LAMINAR_SHARDS": "4", "PATH": "/bin"},
        flags={"port": 1003, "node": None},
    )

    assert (
        loaded.settings.port,
        loaded.settings.shards,
        loaded.settings.weight,
        loaded.settings.join,
    ) == (1003, 4, 2.0, ("a:7070",))
    assert ("--port", "LAMINAR_SHARDS", str(config), "default") == tuple(
        loaded.origins[name] for name in ("port", "shards", "weight", "data")
    )


def test_a_list_is_commas_in_a_variable() -> None:
    """LAMINAR_JOIN=a:1,b:2."""
    assert load(environ={"LAMINAR_JOIN": "a:1, b:2"}).settings.join == ("a:1", "b:2")
    assert load(flags={"join": ("a:1,b:2", "c:3")}).settings.join == ("a:1", "b:2", "c:3")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"flags": {"shard": 2}}, "command line: unknown setting --shard; did you mean --shards?"),
        ({"environ": {"LAMINAR_PROT": "1"}}, "unknown setting LAMINAR_PROT; did you mean LAMINAR_PORT?"),
        ({"environ": {"LAMINAR_XYZZY": "1"}}, "environment: unknown setting LAMINAR_XYZZY"),
        ({"environ": {"LAMINAR_PORT": "http"}}, "LAMINAR_PORT: port must be a whole number (it is 'http')"),
        ({"environ": {"LAMINAR_PIN": "yes"}}, "pin must be one of auto, on, off (it is 'yes')"),
        ({"flags": {"port": 70_000}}, "--port: port must be between 0 and 65,000 (it is 70000)"),
        ({"flags": {"port": True}}, "port must be a whole number (it is True)"),
        ({"flags": {"join": ("nowhere",)}}, "must be a list of HOST:PORT, not 'nowhere'"),
        ({"flags": {"node": "a/b"}}, "node must be 1 to 63 letters"),
        ({"flags": {"heartbeat_ms": 1000}}, "must be at least three times heartbeat_ms"),
        ({"flags": {"host": "0.0.0.0"}}, "no secret is set: set LAMINAR_SECRET"),
        ({"flags": {"host": "db1.example.net"}}, "no secret is set"),
        ({"flags": {"host": "10.0.0.1", "secret": "s" * 16}}, "HTTP is not encrypted"),
        (
            {"flags": {"host": "10.0.0.1", "secret": "s" * 16}},
            "set insecure (--insecure, LAMINAR_INSECURE=true)",
        ),
        ({"flags": {"host": "10.0.0.1", "insecure": True}}, "no secret is set"),
        ({"flags": {"host": "0.0.0.0", "secret": "s" * 16, "insecure": True}}, "set advertise_host"),
        ({"flags": {"gossip_host": "n1"}}, "gossip_host must be an IP address (it is 'n1')"),
        ({"flags": {"tls_key": "k.pem"}}, "tls_key without tls_certificate and tls_ca: TLS needs all three"),
        ({"environ": {"LAMINAR_INSECURE": "perhaps"}}, "insecure must be true or false (it is 'perhaps')"),
    ],
)
def test_what_is_wrong_is_said_with_its_origin_and_a_way_out(sources: dict[str, Any], words: str) -> None:
    """One line, fit to be printed."""
    with pytest.raises(SettingsError) as caught:
        load(**sources)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_in_a_file_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    """A misspelt key that is ignored is a setting that silently isn't set."""
    with pytest.raises(
        SettingsError, match="unknown setting 'segmentsize_bytes'; did you mean 'segment_size_bytes'"
    ):
        load(config=write(tmp_path / "l.toml", "segmentsize_bytes = 1"))


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    """With its path."""
    with pytest.raises(SettingsError, match=r"l\.toml: can't be read"):
        load(config=write(tmp_path / "l.toml", text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that was named must be there."""
    with pytest.raises(SettingsError, match="can't be read"):
        load(config=tmp_path / "none.toml")


def test_the_secret_is_never_shown() -> None:
    """Neither in a repr nor in an error."""
    assert "hunter2" not in repr(Settings(secret="hunter2hunter2hunter2"))
    with pytest.raises(SettingsError) as caught:
        load(environ={"LAMINAR_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_variables_of_the_client_are_not_settings() -> None:
    """LAMINAR_URL and LAMINAR_TOKEN may be in the environment of a server."""
    assert (
        Settings()
        == load(environ={"LAMINAR_URL": "x", "LAMINAR_TOKEN": "y", "LAMINAR_TEST_RUN": "z"}).settings
    )


@pytest.mark.parametrize(
    "sources",
    [
        {"flags": {"insecure": True}},
        {"environ": {"LAMINAR_INSECURE": "true"}},
        {"environ": {"LAMINAR_INSECURE": "1"}},
    ],
)
def test_insecure_opens_http_to_other_machines(sources: dict[str, Any]) -> None:
    """It has to be said, and is of no use without a secret for the nodes."""
    given = {"host": "10.0.0.1", "secret": "s" * 16}
    flags = given | sources.get("flags", {})

    settings = load(environ=sources.get("environ"), flags=flags).settings

    assert settings.insecure
    assert settings.is_insecure
    assert not load(flags={"insecure": True}).settings.is_insecure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.77.3.1", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    """The whole of 127/8 is this machine."""
    assert is_loopback(host)
    assert host == load(flags={"host": host}).settings.host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "1270.0.0.1", "127.0.0.1.example.net", ""])
def test_everything_else_is_not_loopback(host: str) -> None:
    """A name is not resolved: it may mean something else tomorrow."""
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("cpus", "cpu_max", "expected"),
    [
        (8, "", 8),
        (8, "max 100000", 8),
        (8, "200000 100000\n", 2),
        (8, "250000 100000\n", 2),
        (8, "50000 100000\n", 1),
        (2, "800000 100000\n", 2),
        (0, "", 1),
        (4, "nonsense", 4),
    ],
)
def test_the_default_number_of_shards_respects_the_quota(cpus: int, cpu_max: str, expected: int) -> None:
    """cpu.max counts; a part of a CPU is worth no shard; never less than one."""
    assert expected == default_shards(cpus, cpu_max)


def test_this_machine_has_at_least_one_shard() -> None:
    """Whatever its cgroups say."""
    assert shards_of_this_machine() >= 1


def test_no_socket_is_opened_for_settings_that_were_not_loaded(tmp_path: Path) -> None:
    """`Settings` made by a program pass the same two guards before anything is bound."""
    environment = Environment()
    folder = open_data_folder(environment.disk, str(tmp_path / "data"), node="n", joining=False)
    with closing(folder):
        with pytest.raises(PermissionError, match="no secret is set"):
            open_sockets_of(Settings(host="10.0.0.1", insecure=True), 1, folder)
        with pytest.raises(PermissionError, match="HTTP is not encrypted"):
            open_sockets_of(Settings(host="10.0.0.1", secret="s" * 16), 1, folder)


def test_tls_opens_a_host_to_other_machines() -> None:
    """And its URLs are of https; without it, and with `insecure`, what is missing is named."""
    files = {"tls_certificate": "c.pem", "tls_key": "k.pem", "tls_ca": "ca.pem"}
    given = {"host": "10.0.0.1", "secret": "s" * 16}

    settings = load(flags=given | files).settings
    assert (True, "https", False) == (settings.tls, settings.scheme, settings.is_insecure)
    settings = load(flags=given | {"insecure": True}).settings
    assert (False, "http", True) == (settings.tls, settings.scheme, settings.is_insecure)
    assert ["HTTP is not encrypted (tls_certificate)"] == settings.lacks


def test_a_node_to_join_may_be_given_by_its_url() -> None:
    """As everything else takes it; what is no HTTP is refused with both forms."""
    joined = load(flags={"join": ["http://10.0.0.1:7070/", "10.0.0.2:7070"]}).settings.join

    assert ("10.0.0.1:7070", "10.0.0.2:7070") == joined
    with pytest.raises(SettingsError, match=r"HOST:PORT or http\[s\]://HOST:PORT"):
        load(flags={"join": ["ftp://10.0.0.1:7070"]})


@pytest.mark.parametrize(
    "given", ["http://localhost:3000,https://a.b/", ["http://localhost:3000", "https://a.b"]]
)
def test_an_origin_keeps_its_scheme(given: object) -> None:
    """Only where a node is named a URL stands for its HOST:PORT."""
    assert ("http://localhost:3000", "https://a.b") == convert("origins", given, origin="a flag")
    assert ("h:1", "g:2") == convert("join", "http://h:1/, g:2", origin="a flag")
