"""HTTP over TLS, by the client's side: what it trusts, and what it says of what it does not trust."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from laminar.http.client.connection import ask_once, open_connection
from laminar.http.client.tls import Trust
from laminar.http.protocol.answer import ConnectionFailed, TlsFailed
from tests.certificates import Authority, Pair

# How long tests wait for what should come at once.
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


@asynccontextmanager
async def serving_tls(certificate: Pair | None) -> AsyncIterator[int]:
    """Yield the port of a server that answers each request with its body's length."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, rest = head.partition(b"content-length: ")
                body = await reader.readexactly(int(rest.partition(b"\r\n")[0] or 0))
                said = b"%d" % len(body)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    context = None if certificate is None else certificate.server_context()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.05)


async def refusal(url: str, ca: Path | str) -> TlsFailed:
    with pytest.raises(TlsFailed) as failed:
        await open_connection(url, timeout_s=PATIENCE_S, trust=Trust(str(ca)))
    assert not failed.value.sent
    return failed.value


@pytest.mark.parametrize("as_text", [False, True])
async def test_requests_go_over_tls(authority: Authority, as_text: bool) -> None:
    """Pipelined, small and large, with the CA as a file or as its text."""
    trust = Trust(authority.pem.read_text() if as_text else str(authority.pem))
    async with serving_tls(authority.node("n1")) as port:
        connection = await open_connection(
            f"https://localhost:{port}", timeout_s=PATIENCE_S, trust=trust, shard=(0, 1)
        )
        sizes = [0, 1, 70_000, 3, 2_000_000, 5]
        asked = [
            connection.ask(
                b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size, (bytes(size),), timeout_s=PATIENCE_S
            )
            for size in sizes
        ]
        answers = await asyncio.gather(*asked)
        connection.abort()
        await connection.lost

    assert sizes == [answer.json() for answer in answers]


async def test_a_certificate_of_another_ca_is_refused(
    authority: Authority, other_authority: Authority
) -> None:
    """The error names host and CA file, and what to give."""
    async with serving_tls(other_authority.node("n1")) as port:
        failed = await refusal(f"https://127.0.0.1:{port}", authority.pem)
        with pytest.raises(TlsFailed, match="verified with the system's CAs"):
            await ask_once(f"https://127.0.0.1:{port}", "GET", "/", timeout_s=PATIENCE_S)

    assert f"https://127.0.0.1:{port}: the certificate of 127.0.0.1 is not accepted" in str(failed)
    assert str(authority.pem) in str(failed) and "LAMINAR_CA" in str(failed.hint)


async def test_a_certificate_of_another_host_is_refused(authority: Authority) -> None:
    async with serving_tls(authority.node("n2", "node1.example")) as port:
        by_name = await refusal(f"https://localhost:{port}", authority.pem)
        by_address = await refusal(f"https://127.0.0.1:{port}", authority.pem)

    assert "Hostname mismatch" in str(by_name) and "'localhost'" in str(by_name)
    assert "IP address mismatch" in str(by_address)
    assert "a name that the certificate has" in str(by_name.hint) and by_name.hint == by_address.hint


async def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    async with serving_tls(authority.node("old", days=-1)) as port:
        failed = await refusal(f"https://127.0.0.1:{port}", authority.pem)

    assert "certificate has expired" in str(failed) and "renew the certificate of 127.0.0.1" in str(
        failed.hint
    )


async def test_the_certificate_of_a_client_is_no_server_s(authority: Authority) -> None:
    """Otherwise each client of the cluster could pretend to be a node."""
    async with serving_tls(authority.client("client")) as port:
        failed = await refusal(f"https://127.0.0.1:{port}", authority.pem)

    assert "unsuitable certificate purpose" in str(failed) or "unsupported certificate purpose" in str(failed)


async def test_a_server_without_tls_is_named(authority: Authority) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read(1)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    failed = await refusal(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", authority.pem)
    server.close()
    await asyncio.sleep(0.05)

    assert "answers without TLS" in str(failed) and "is it http:" in str(failed.hint)


async def test_a_connection_lost_in_the_handshake_may_be_tried_again(authority: Authority) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(ConnectionFailed) as failed:
        await open_connection(url, timeout_s=PATIENCE_S, trust=Trust(str(authority.pem)))
    server.close()
    await asyncio.sleep(0.05)

    assert not isinstance(failed.value, TlsFailed) and not failed.value.sent


async def test_http_to_a_server_with_tls_has_no_answer(authority: Authority) -> None:
    """Such a server ends what it does not understand without a word, so the failure asks."""
    async with serving_tls(authority.node("n1")) as port:
        with pytest.raises(ConnectionFailed, match="before its first answer; is it https://"):
            await ask_once(f"http://127.0.0.1:{port}", "GET", "/", timeout_s=PATIENCE_S)


async def test_a_ca_file_that_changed_is_read_again(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    """For new connections. A file that is being written leaves the CAs as they were."""
    file = tmp_path / "ca.pem"
    file.write_bytes(other_authority.pem.read_bytes())
    trust = Trust(str(file))
    async with serving_tls(authority.node("n1")) as port:
        url = f"https://127.0.0.1:{port}"
        with pytest.raises(TlsFailed):
            await open_connection(url, timeout_s=PATIENCE_S, trust=trust)
        os.replace(_copy(authority.pem, tmp_path / "new.pem"), file)
        assert 200 == (await ask_once(url, "GET", "/", timeout_s=PATIENCE_S, trust=trust)).status
        file.write_text("half a fi")
        assert 200 == (await ask_once(url, "GET", "/", timeout_s=PATIENCE_S, trust=trust)).status


def _copy(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes())
    return target


def test_what_holds_no_ca_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for given, said in [("none", "No such file"), ("empty", "no certificates"), (".", "directory")]:
        with pytest.raises(ValueError, match=said):
            Trust(str(tmp_path / given))
    with pytest.raises(ValueError, match="the given CA"):
        Trust("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def test_old_versions_of_tls_are_not_spoken(authority: Authority) -> None:
    for trust in (Trust(), Trust(str(authority.pem))):
        context = trust.context()
        assert ssl.TLSVersion.TLSv1_2 == context.minimum_version
        assert context.check_hostname and ssl.CERT_REQUIRED == context.verify_mode


def test_plain_asyncio_speaks_tls_too(authority: Authority, other_authority: Authority) -> None:
    """A user's program may have any loop."""

    async def main() -> None:
        async with serving_tls(authority.node("n1")) as port:
            url = f"https://127.0.0.1:{port}"
            answer = await ask_once(url, "GET", "/", timeout_s=PATIENCE_S, trust=Trust(str(authority.pem)))
            assert 200 == answer.status
            assert "not accepted" in str(await refusal(url, other_authority.pem))

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())
