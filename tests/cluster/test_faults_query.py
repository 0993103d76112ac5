"""What the comparison of a topic with its copy by a Spark query says."""

from __future__ import annotations

from tests.cluster.faults.query import differences


def test_a_copy_with_another_order_of_its_keys_is_the_same() -> None:
    """Between two keys there is no order."""
    assert [] == differences([("a", 1), ("b", 1), ("a", 2)], [("b", 1), ("a", 1), ("a", 2)])


def test_what_differs_is_told_by_key() -> None:
    """Lost, doubled, in another order; a record that the source lacks; a key that it lacks."""
    source = [("lost", 1), ("lost", 2), ("twice", 1), ("turned", 1), ("turned", 2), ("turned", 3)]
    target = [
        ("lost", 2),
        ("twice", 1),
        ("twice", 1),
        ("turned", 1),
        ("turned", 3),
        ("turned", 2),
        ("new", 4),
    ]

    assert [
        "lost: key lost: [1]",
        "doubled: key new: [4]",
        "reordered: key turned: [3, 2] from 1 on",
        "doubled: key twice: [1]",
    ] == differences(source, target)
