"""The listener of TLS: who never ends a handshake holds little, for a short time, and delays no one."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from laminar.node.host.certificates import Certificates, reason_of
from laminar.node.host.tls_listener import TlsListener
from tests.certificates import Authority
from tests.http.serving import until


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or True
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]  # uvloop's transports are of no class of asyncio


class Listening:
    """A listener, and what it reported."""

    def __init__(self, authority: Authority, *, most: int, handshake_s: float) -> None:
        self.certificates = Certificates(authority.files(authority.node("n1")))
        self.failures: list[str] = []
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self.listener = TlsListener(
            sock,
            make=Echo,
            failed=lambda protocol, error: self.failures.append(reason_of(error)),
            context=lambda: self.certificates.current.http,
            most=most,
            handshake_s=handshake_s,
        )

    async def echo(self, context: ssl.SSLContext) -> float:
        """Connect, send and receive; return the seconds it took."""
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        writer.write(b"hello")
        assert b"hello" == await reader.readexactly(5)
        writer.close()
        return time.monotonic() - began


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A CA."""
    return Authority(tmp_path / "ca")


@pytest.fixture
async def open_listener(authority: Authority) -> AsyncIterator[Callable[..., Listening]]:
    """Make listeners; closed at the end."""
    made: list[Listening] = []

    def make(*, most: int = 8, handshake_s: float = 60.0) -> Listening:
        made.append(Listening(authority, most=most, handshake_s=handshake_s))
        return made[-1]

    yield make
    for each in made:
        each.listener.close()
    await asyncio.sleep(0.05)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_are_spoken(
    authority: Authority, open_listener: Callable[..., Listening], version: ssl.TLSVersion
) -> None:
    """TLS 1.2 and 1.3."""
    listening = open_listener()

    await listening.echo(authority.context(version=version))

    assert [] == listening.failures


async def test_a_handshake_that_never_ends_is_ended(
    authority: Authority, open_listener: Callable[..., Listening]
) -> None:
    """After its time, with its socket."""
    await open_listener().echo(authority.context())  # all files that any connection opens are open now
    listening = open_listener(handshake_s=0.3)
    await asyncio.sleep(0.1)
    before = open_files()
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
    writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello

    began = time.monotonic()
    assert b"" == await asyncio.wait_for(reader.read(), 60)
    assert 0.2 < time.monotonic() - began
    writer.close()
    await until(lambda: open_files() <= before)  # fewer, if a garbage collection has closed some meanwhile

    assert 0 == listening.listener.handshakes
    assert 1 == len(listening.failures)


async def test_many_that_never_end_keep_no_honest_client_out(
    authority: Authority, open_listener: Callable[..., Listening]
) -> None:
    """Of too many the oldest goes: an attacker holds `most` sockets, and others are served at once."""
    listening = open_listener(most=8, handshake_s=30)
    silent = [await asyncio.open_connection("127.0.0.1", listening.port) for _ in range(40)]
    context = authority.context()

    took_s = [await listening.echo(context) for _ in range(5)]

    assert max(took_s) < 25
    assert listening.listener.handshakes <= 8
    assert len(listening.failures) >= 32
    for _, writer in silent:
        writer.close()


async def test_plain_text_is_refused_at_once(open_listener: Callable[..., Listening]) -> None:
    """A client that speaks HTTP to a port of TLS waits for nothing."""
    listening = open_listener(handshake_s=30)
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    assert b"" == await asyncio.wait_for(reader.read(), 60)

    assert ["the other side speaks http://, not https://"] == listening.failures
    writer.close()


async def test_older_versions_are_refused(
    authority: Authority, open_listener: Callable[..., Listening]
) -> None:
    """TLS 1.1 is not spoken."""
    listening = open_listener()
    context = authority.context()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")

    with pytest.raises(OSError):
        await listening.echo(context)

    assert ["unsupported protocol"] == listening.failures


async def test_a_connection_keeps_its_certificate_and_the_next_gets_the_new_one(
    authority: Authority, open_listener: Callable[..., Listening]
) -> None:
    """Files that change end no connection."""
    listening = open_listener()
    context = authority.context()
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.port, ssl=context)
    old = writer.get_extra_info("peercert")["serialNumber"]

    authority.node("n1")
    assert listening.certificates.refresh()
    _, later = await asyncio.open_connection("127.0.0.1", listening.port, ssl=context)

    assert old != later.get_extra_info("peercert")["serialNumber"]
    writer.write(b"still here")
    assert b"still here" == await reader.readexactly(10)
    writer.close()
    later.close()


async def test_without_free_files_connections_wait(
    authority: Authority, open_listener: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not spin, and accepting goes on by itself."""
    monkeypatch.setattr("laminar.node.host.tls_listener._PAUSE_S", 0.1)
    listening = open_listener()
    real, calls = listening.listener._sock, []

    class Full:
        def accept(self) -> None:
            calls.append(1)
            raise OSError(errno.EMFILE, "too many open files")

        def fileno(self) -> int:
            return real.fileno()

    listening.listener._sock = Full()  # type: ignore[assignment]  # all that is used of it
    began = time.monotonic()
    task = asyncio.create_task(listening.echo(authority.context()))
    await until(lambda: len(calls) >= 3)
    assert len(calls) <= 2 + (time.monotonic() - began) / 0.1
    listening.listener._sock = real

    await asyncio.wait_for(task, 60)


def test_asyncios_own_loop_serves_as_well(authority: Authority) -> None:
    """An embedded node runs in its user's loop."""

    async def main() -> None:
        patient = Listening(authority, most=8, handshake_s=60)
        await patient.echo(authority.context())
        patient.listener.close()
        listening = Listening(authority, most=8, handshake_s=0.3)
        silent, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        assert b"" == await asyncio.wait_for(silent.read(), 60)
        writer.close()
        listening.listener.close()
        await asyncio.sleep(0.05)
        assert 1 == len(listening.failures)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())
