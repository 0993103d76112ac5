"""An object store for tests: moto's server, or versitygw with LAMINAR_TEST_S3=versitygw."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.nets import port_block

BUILD = Path(__file__).parents[3] / "build/s3"
MOTO = BUILD / "bin/moto_server"
VERSITYGW = BUILD / "versitygw"
WHY_NONE = "no object store: `make build/s3/ready` fetches moto, by pip"
KEY, SECRET = "a-key", "a-secret"


def can_be_had() -> bool:
    return MOTO.exists() or _is_versitygw()


def _is_versitygw() -> bool:
    """Whether `make s3-check` runs the tests."""
    return os.environ.get("LAMINAR_TEST_S3") == "versitygw"


@contextmanager
def object_store(folder: Path) -> Iterator[str]:
    """A running store; its URL."""
    with port_block() as port:
        command: list[str | Path] = [MOTO, "-p", str(port)]
        if _is_versitygw():
            (folder / "objects").mkdir()
            command = [VERSITYGW, "--port", f"127.0.0.1:{port}", "posix", folder / "objects"]
        environment = {**os.environ, "ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
        said = folder / "said"
        with open(said, "wb") as log:
            with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
                try:
                    while not _listens(port):
                        assert process.poll() is None, said.read_text()
                    yield f"http://127.0.0.1:{port}"
                finally:
                    process.terminate()


def _listens(port: int) -> bool:
    """Whether a server does; waits a little if not."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        threading.Event().wait(0.02)
        return False
    return True


class Cutting:
    """A proxy before a store: `cut_answer(request)` says after how many bytes the answer ends, if at all.

    It is asked for each request, with its first line; None is never. The store has then carried out the
    request: of an answer that asks for the body of the request ("100 Continue") nothing is cut.
    """

    def __init__(self, store: str) -> None:
        host, _, port = store.removeprefix("http://").rpartition(":")
        self._store = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.cut_answer: Callable[[str], int | None] = lambda request: None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request and its answer, by a connection of its own to the store."""
        with (
            contextlib.suppress(OSError),
            closing(client),
            closing(socket.create_connection(self._store)) as store,
        ):
            head = b""
            while b"\r\n\r\n" not in head:
                data = client.recv(65536)
                if not data:
                    return
                head += data
            least = self.cut_answer(head.split(b"\r\n", 1)[0].decode())
            store.sendall(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            threading.Thread(target=_pump, args=(client, store), daemon=True).start()
            answer = store.makefile("rb")
            if b"\r\nexpect: 100-continue\r\n" in head.lower():
                first = answer.readline()
                while first.startswith(b"HTTP/1.1 100 "):
                    client.sendall(first + answer.readline())
                    first = answer.readline()
            else:
                first = b""
            passed = 0
            while data := first or answer.read1(65536):
                first = b""
                if least is not None and passed + len(data) > least:
                    self.cuts += 1
                    client.sendall(data[: max(0, least - passed)])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
                passed += len(data)
            client.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that answers each request so, and is no store; its URL."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), closing(client):
                client.recv(65536)
                client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def objects(client: Any, bucket: str, prefix: str) -> dict[str, bytes]:
    """All objects below a prefix, by name, with their bytes."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
    return {
        key.removeprefix(f"{prefix}/"): client.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in keys
    }
