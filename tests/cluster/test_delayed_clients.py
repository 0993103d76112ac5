"""Delayed records of a producer, over the death of their leaders and the end of their partition."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import laminar
from laminar.testing.cluster import LocalCluster

HOUR_MS = 3_600_000
# Each is asked for, moved and asked for again. The leader dies after a quarter, the split comes after half.
RECORDS = 240


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def kill_leader(
    cluster: LocalCluster, topic: laminar.Topic[bytes], beside: ThreadPoolExecutor
) -> Future[None]:
    """Kill the node that leads the first partition that takes records, and start it again beside."""
    names = [member.name for member in cluster.members]
    number = min(topic.route().ranges)
    deadline = time.monotonic() + 60
    while (leader := {each.partition: each.leader for each in topic.partitions()}[number]) not in names:
        assert time.monotonic() < deadline, leader
        time.sleep(0.05)
    killed = names.index(str(leader))
    cluster.kill(killed)
    return beside.submit(cluster.restart, killed)


def test_what_a_producer_delays_is_published_once_over_kills_and_a_split(cluster: LocalCluster) -> None:
    """Under the id in its receipt, and not before its time; also what came when the partition was sealed."""
    with laminar.connect(cluster.urls, timeout=60) as client, ThreadPoolExecutor(2) as beside:
        topic = client.create_topic("due", partitions=1, replicas=3)
        restarted: Future[None] | None = None
        split: Future[object] | None = None
        sent: list[tuple[bytes, laminar.Delivery]] = []
        with topic.producer(batch_bytes=400) as producer:
            while split is None or not split.done() or len(sent) < RECORDS:
                value = b"%d" % len(sent)
                later_ms = now_ms() + HOUR_MS
                sent.append((value, producer.send(value, f"k{len(sent) % 17}", deliver_at=later_ms)))
                if len(sent) == RECORDS // 4:
                    sent[0][1].result(60)
                    restarted = kill_leader(cluster, topic, beside)
                elif (
                    restarted is not None and restarted.done() and split is None and len(sent) > RECORDS // 2
                ):
                    split = beside.submit(topic.split, 0, at=32_768, wait=60)
                # Few more: each is asked for afterwards, and a node may take long to be there again.
                time.sleep(0.002 if len(sent) < RECORDS else 0.1)
            split.result()
            sent += [(b"last", producer.send(b"last", "k", deliver_at=now_ms() + HOUR_MS))]

        ids = {value: str(delivery.result().scheduled) for value, delivery in sent}
        assert len(sent) == len(ids) == len(set(ids.values()))
        assert {"0", "1", "2"} >= {each.partition(".")[0] for each in ids.values()} > {"0"}
        assert {"pending"} == {topic.delayed(each).state for each in ids.values()}
        assert sorted(ids.values()) == sorted(each.id for each in topic.list_delayed())

        due: dict[bytes, int] = {}
        for value, each in ids.items():
            due[value] = now_ms() + 2_000
            topic.move_delayed(each, deliver_at=due[value])
        seen: dict[bytes, int] = {}
        for record in topic.read(follow=True):
            assert record.raw not in seen, "it is published once"
            seen[record.raw] = now_ms()
            if len(seen) == 50:
                restarted = kill_leader(cluster, topic, beside)
            if len(seen) == len(due):
                break
        assert due.keys() == seen.keys()
        assert all(seen[value] >= due[value] for value in due), "none is early"
        assert sorted(due) == sorted(record.raw for record in topic.read())
        assert {"published"} == {topic.delayed(each).state for each in ids.values()}
        assert [] == topic.count_delayed()
        assert restarted is not None
        restarted.result()
