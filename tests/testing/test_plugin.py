"""The fixtures that a project gets by installing us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laminar.testing.plugin import laminar_client, laminar_url

if TYPE_CHECKING:
    from laminar import Client

__all__ = [
    "laminar_client",
    "laminar_url",
]  # fixtures of this module, as the entry point makes them everybody's


def test_the_fixture_is_a_client_of_a_real_server(laminar_client: Client) -> None:
    topic = laminar_client.create_topic("of-this-test", partitions=1)

    assert 0 == topic.append(b"x").offset
    assert [b"x"] == [record.value for record in topic.read()]
