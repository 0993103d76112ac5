"""Kafka: three brokers, three partitions, three replicas, synced at each append.

As a log: an idempotent producer that waits 5 ms for a batch, or not at all for single records, and a consumer
that takes 1,000 records at a time.

As a queue: share groups. Kafka answers acknowledgements together: each job of a batch is acknowledged by
itself, and `commit_sync` sends all and waits for the answer. What brokers and the share coordinator append is
synced before it is answered (`log.flush.interval.messages=1`), and two of three replicas must have it.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benches.queues.queues import (
    EMPTY_S,
    FETCH,
    NODES,
    PARTITIONS,
    PATIENCE_S,
    PEERS,
    VALUE,
    Send,
    Work,
    free_ports,
    patiently,
    server,
)

TITLE = "Kafka share group"
JARS = PEERS / "kafka"
JAVA = ("java", "-Xms256m", "-Xmx512m", "-cp", f"{JARS}/*")
CLUSTER = "bGFtaW5hcmJlbmNobWFyaw"
LOG = f"""
min.insync.replicas=2
default.replication.factor={NODES}
log.flush.interval.messages=1
offsets.topic.replication.factor={NODES}
offsets.topic.num.partitions=1
share.coordinator.state.topic.replication.factor={NODES}
share.coordinator.state.topic.min.isr=2
share.coordinator.state.topic.num.partitions=3
group.share.min.heartbeat.interval.ms=500
group.share.heartbeat.interval.ms=500
"""

Result = TypeVar("Result")


def missing() -> str | None:
    """Return what is not there, if so."""
    if shutil.which("java") is None:
        return "Java is not there"
    if not list(JARS.glob("kafka_*.jar")):
        return f"{JARS} has no jars"
    return None if find_spec("confluent_kafka") else "the library confluent_kafka is not there"


class Topics:
    """Topics of three brokers. Each consumer has a thread of its own: the library blocks."""

    def __init__(self, bootstrap: str, pids: Sequence[int]) -> None:
        self.pids = pids
        self._kafka = importlib.import_module("confluent_kafka")
        self._admin = importlib.import_module("confluent_kafka.admin")
        self.servers = {"bootstrap.servers": bootstrap, "log_level": 2}

    async def _alone(self, do: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(None, do)

    async def ready(self) -> None:
        """Raise if a broker is not there yet."""

        def look() -> None:
            found = self._admin.AdminClient(self.servers).list_topics(timeout=5)
            assert len(found.brokers) == NODES, "a broker is not there"

        await self._alone(look)

    async def make(self, name: str) -> None:
        """Make a topic."""
        await self._alone(lambda: self._create(name))

    def _create(self, name: str) -> Any:
        admin = self._admin.AdminClient(self.servers)
        admin.create_topics([self._admin.NewTopic(name, PARTITIONS, NODES)])[name].result(PATIENCE_S)
        return admin

    def _produce(self, name: str, records: int) -> None:
        failed: list[Any] = []

        def answered(error: Any, message: Any) -> None:
            if error is not None:
                failed.append(error)

        settings = {"acks": "all", "enable.idempotence": True, "linger.ms": 5}
        producer = self._kafka.Producer(self.servers | settings)
        for number in range(records):
            while True:
                try:
                    producer.produce(name, VALUE, partition=number % PARTITIONS, on_delivery=answered)
                    break
                except BufferError:  # as many as the library holds are under way
                    producer.poll(0.1)
            producer.poll(0)
        assert producer.flush(PATIENCE_S) == 0 and not failed, failed[:1]

    async def send_all(self, name: str, records: int) -> None:
        """Produce to all partitions by turns, in batches of 5 ms."""
        await self._alone(lambda: self._produce(name, records))

    @asynccontextmanager
    async def sender(self, name: str) -> AsyncIterator[Send]:
        """Return what produces one record; a thread takes the acknowledgements."""
        settings = {"acks": "all", "enable.idempotence": True, "linger.ms": 0}
        producer = self._kafka.Producer(self.servers | settings)
        loop = asyncio.get_running_loop()
        ended = False

        def poll() -> None:
            while not ended:
                producer.poll(0.1)

        def settle(future: asyncio.Future[None], error: Any) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(RuntimeError(str(error)))

        def send(partition: int) -> asyncio.Future[None]:
            future = loop.create_future()
            producer.produce(
                name,
                VALUE,
                partition=partition,
                on_delivery=lambda error, _: loop.call_soon_threadsafe(settle, future, error),
            )
            return future

        polling = loop.run_in_executor(None, poll)
        try:
            yield send
        finally:
            ended = True
            await polling

    def _read(self, name: str) -> int:
        consumer = self._kafka.Consumer(self.servers | {"group.id": "bench", "enable.auto.commit": False})
        wanted, read, places = 0, 0, []
        for number in range(PARTITIONS):
            low, high = consumer.get_watermark_offsets(self._kafka.TopicPartition(name, number))
            wanted += high - low
            places.append(self._kafka.TopicPartition(name, number, low))
        consumer.assign(places)
        while read < wanted:
            for message in consumer.consume(1000, 1.0):
                assert message.error() is None, message.error()
                read += len(message.value()) > 0
        consumer.close()
        return read

    async def read_all(self, name: str) -> int:
        """Read all partitions, without a group."""
        return await self._alone(lambda: self._read(name))

    def _make(self, name: str, jobs: int) -> None:
        admin = self._create(name)
        entry = self._admin.ConfigEntry(
            "share.auto.offset.reset", "earliest", incremental_operation=self._admin.AlterConfigOpType.SET
        )
        group = self._admin.ConfigResource(self._admin.ResourceType.GROUP, name, incremental_configs=[entry])
        for answer in admin.incremental_alter_configs([group]).values():
            answer.result(PATIENCE_S)
        self._produce(name, jobs)

    async def fill(self, name: str, jobs: int) -> None:
        """Make a topic, and let its group begin with the oldest record."""
        await self._alone(lambda: self._make(name, jobs))

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Work]:
        """Return a consumer that is a member of the group."""
        consumer = self._kafka.ShareConsumer(
            self.servers
            | {"group.id": name, "share.acknowledgement.mode": "explicit", "max.poll.records": FETCH}
        )
        consumer.subscribe([name])

        def take() -> Sequence[Hashable]:
            batch = list(consumer.poll(EMPTY_S))
            for message in batch:
                assert message.error() is None, message.error()
                consumer.acknowledge(message)
            if batch:
                for error in consumer.commit_sync(PATIENCE_S).values():
                    assert error is None, error
            return [(message.partition(), message.offset()) for message in batch]

        with ThreadPoolExecutor(1) as thread:
            loop = asyncio.get_running_loop()
            yield lambda: loop.run_in_executor(thread, take)
            await loop.run_in_executor(thread, consumer.close)


@asynccontextmanager
async def start(folder: Path) -> AsyncIterator[Topics]:
    """Start three brokers, each a controller too."""
    found = free_ports(2 * NODES)
    ports, controls = found[:NODES], found[NODES:]
    voters = ",".join(f"{number + 1}@127.0.0.1:{controls[number]}" for number in range(NODES))
    pids: list[int] = []
    async with AsyncExitStack() as stack:
        for number in range(NODES):
            store = folder / f"kafka-{number}"
            store.mkdir()
            settings = store / "server.properties"
            settings.write_text(
                f"node.id={number + 1}\nprocess.roles=broker,controller\ncontroller.quorum.voters={voters}\n"
                f"listeners=CLIENT://127.0.0.1:{ports[number]},CONTROLLER://127.0.0.1:{controls[number]}\n"
                f"advertised.listeners=CLIENT://127.0.0.1:{ports[number]}\n"
                "listener.security.protocol.map=CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT\n"
                "controller.listener.names=CONTROLLER\ninter.broker.listener.name=CLIENT\n"
                f"log.dirs={store}/data\n{LOG}"
            )
            with (store / "format").open("wb") as out:
                formatting = await asyncio.create_subprocess_exec(
                    *JAVA, "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", settings,
                    stdout=out, stderr=out,
                )  # fmt: skip
            assert await formatting.wait() == 0, (store / "format").read_text()
            pids.append(
                await stack.enter_async_context(server(store / "log", *JAVA, "kafka.Kafka", settings))
            )
        topics = Topics(",".join(f"127.0.0.1:{port}" for port in ports), pids)
        await patiently(topics.ready)
        yield topics
