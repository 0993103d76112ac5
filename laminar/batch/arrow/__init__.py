"""Batches as Arrow, and Arrow as batches: with pyarrow, and in the node without it.

`ipc_writer` and `ipc_reader` speak the stream format alone; `pyarrow_out` and `pyarrow_in` need pyarrow.
"""
