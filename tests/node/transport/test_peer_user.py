"""Whose process is at the other end of a TCP connection: as the kernel says."""

from __future__ import annotations

import multiprocessing
import os
import socket

import pytest

from laminar.node.transport.peer_user import NO_SUCH_SOCKET, user_at_other_end


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_our_own_is_known(host: str) -> None:
    """Over both families."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            if user_at_other_end(accepted) is None:
                pytest.skip("this kernel has no socket diagnosis")
            assert os.getuid() == user_at_other_end(accepted) == user_at_other_end(client)


def _connect_as(user: int, address: tuple[str, int]) -> None:
    os.setuid(user)
    with socket.create_connection(address) as connection:
        connection.recv(1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of others")
def test_another_users_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = multiprocessing.get_context("fork").Process(
            target=_connect_as, args=(65_534, server.getsockname())
        )
        other.start()
        accepted, _ = server.accept()
        with accepted:
            assert user_at_other_end(accepted) in (65_534, None)
        other.join()


def test_one_that_is_gone_is_nobodys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            # A reset leaves nothing behind, not even the time that a closed connection waits.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            assert user_at_other_end(accepted) == NO_SUCH_SOCKET
