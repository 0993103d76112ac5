"""The floor of a source in Python that reads from a server: a bare socket, whole blocks, and no checks.

A server sends blocks of values from its memory as fast as they are taken; the source receives each into one
buffer and slices record batches out of it. No source that gets its records over a connection does less.
Spark's processes import this module by name; run as a program it is the server, and prints its port.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benches.spark.spark_sources import BATCH_ROWS, VALUE_BYTES, record_batch
from laminar.spark.read.options import COLUMNS, DEFAULT_COLUMNS

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

# As many bytes as Laminar's source asks for at a time.
BATCHES_A_BLOCK = 4
BATCH_BYTES = BATCH_ROWS * VALUE_BYTES
BLOCK_BYTES = BATCHES_A_BLOCK * BATCH_BYTES
_HOST = "127.0.0.1"
_COUNT_BYTES = 8


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """Run the server; yield its port and the id of its process."""
    command = [sys.executable, "-m", "benches.spark.spark_socket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


class SocketSource(DataSource):
    """``rows`` records over ``partitions`` tasks, from the server at ``port``."""

    @classmethod
    def name(cls) -> str:
        return "bench-socket"

    def schema(self) -> str:
        names = self.options.get("columns", ",".join(DEFAULT_COLUMNS)).split(",")
        return ", ".join(f"{name} {COLUMNS[name]}" for name in names)

    def reader(self, schema: StructType) -> DataSourceReader:
        rows, partitions, port = (int(self.options[name]) for name in ("rows", "partitions", "port"))
        return SocketReader(schema, rows, partitions, port)


class SocketReader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int, partitions: int, port: int) -> None:
        self._schema = schema
        self._batches = rows // partitions // BATCH_ROWS
        self._partitions = partitions
        self._port = port

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        from laminar.spark.read.cluster import tune

        # All columns but the value are made once: what is measured is the way of the values.
        pattern = record_batch(self._schema)
        at = pattern.schema.get_field_index("value")
        ends = pattern.column(at).buffers()[1]
        tune()
        with socket.create_connection((_HOST, self._port)) as peer:
            peer.sendall(self._batches.to_bytes(_COUNT_BYTES, "big"))
            for size in block_sizes(self._batches):
                block = memoryview(bytearray(size))
                filled = 0
                while filled < size:
                    filled += peer.recv_into(block[filled:])
                for first in range(0, size, BATCH_BYTES):
                    data = pyarrow.py_buffer(block[first : first + BATCH_BYTES])
                    columns = pattern.columns
                    columns[at] = pyarrow.Array.from_buffers(pyarrow.binary(), BATCH_ROWS, [None, ends, data])
                    yield pyarrow.RecordBatch.from_arrays(columns, schema=pattern.schema)


def block_sizes(batches: int) -> Iterator[int]:
    """Yield the bytes of each block that holds some of `batches` batches."""
    for sent in range(0, batches, BATCHES_A_BLOCK):
        yield min(BATCHES_A_BLOCK, batches - sent) * BATCH_BYTES


def _send(peer: socket.socket, block: bytes) -> None:
    with peer, memoryview(block) as whole:
        for size in block_sizes(int.from_bytes(peer.recv(_COUNT_BYTES, socket.MSG_WAITALL), "big")):
            peer.sendall(whole[:size])


def _serve() -> None:
    block = bytes(BLOCK_BYTES)
    with socket.create_server((_HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=_send, args=(listener.accept()[0], block), daemon=True).start()


if __name__ == "__main__":
    _serve()
