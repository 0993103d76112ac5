"""The fixtures that a project gets by installing us: nothing is imported here to have them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laminar import Client


def test_pytest_finds_the_plugin_by_itself() -> None:
    """Through the distribution's entry point."""
    (found,) = entry_points(group="pytest11", name="laminar")

    assert "laminar.testing.plugin" == found.value


def test_the_fixture_is_a_client_of_a_real_server(laminar_client: Client) -> None:
    topic = laminar_client.create_topic("of-this-test", partitions=1)

    assert 0 == topic.append(b"x").offset
    assert [b"x"] == [record.value for record in topic.read()]
