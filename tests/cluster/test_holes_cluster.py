"""Segments that are short or gone on one node of a running cluster: nobody is served past what is missing."""

from __future__ import annotations

from pathlib import Path

import httpx

from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S, asked, until


def test_a_sealed_segment_that_is_short_or_gone_is_filled_from_the_other_replicas(tmp_path: Path) -> None:
    """On one node of three, while it is down: nobody is ever served past the missing records, and the
    segments are whole again.
    """
    count, size = 40, 100_000
    with (
        LocalCluster(tmp_path, nodes=3, shards=1, settings={"segment-size-bytes": 1 << 20}) as cluster,
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as http,
    ):
        urls = [f"{url}/v1/topics/t/partitions/0/records" for url in cluster.urls]
        made = asked(http, "PUT", f"{cluster.urls[0]}/v1/topics/t", json={"partitions": 1})
        assert made.is_success, made.text
        for number in range(count):
            answer = asked(
                http,
                "POST",
                urls[0],
                content=b"%05d" % number * (size // 5),
                headers={"Content-Type": "application/octet-stream"},
            )
            assert answer.status_code in (200, 201), answer.text
        # A majority has all; the third may have stood still.
        last = {"offset": count - 1, "min_offset": count, "wait_ms": 1000}
        local = {"Laminar-Local": "1"}
        until(lambda: http.get(urls[2], params=last, headers=local).is_success, "the third node has all")
        victim = cluster.members[2]
        assert victim.process is not None
        victim.process.terminate()  # in order, so that its last checkpoint names all segments
        assert 0 == victim.process.wait(60)
        cluster.kill(2)
        first, second, third, *_ = sorted(victim.data.glob("logs/t-0-*/*.log"))
        whole = {path: path.read_bytes() for path in (first, second, third)}
        second.write_bytes(whole[second][:-1])
        third.unlink()
        third.with_suffix(".index").unlink()
        cluster.restart(2)

        at = 0
        while at < count:
            answer = asked(http, "GET", urls[2], params={"offset": at, "read": "replica", "max_bytes": 1})
            assert 200 == answer.status_code, answer.text
            [record] = answer.json()["records"]
            assert (at, f"{at:05}") == (record["offset"], record["value"][:5])
            at += 1

        quarantined = 'laminar_storage_damage_quarantined{process="shard-0"} '

        def healed() -> bool:
            lines = http.get(f"{cluster.urls[2]}/metrics").text.splitlines()
            [line] = [line for line in lines if line.startswith(quarantined)]
            return float(line.removeprefix(quarantined)) == 0

        until(healed, "every missing entry is fetched from the others")
        held = b"".join(path.read_bytes() for path in sorted(victim.data.glob("logs/t-0-*/*.log")))
        assert whole[second] + whole[third] in held
