"""Conversion between batches and Arrow, with the library pyarrow, and in nodes without it.

`ipc_writer` and `ipc_reader` handle Arrow's stream format by themselves; `pyarrow_out` and `pyarrow_in` need
pyarrow.
"""
