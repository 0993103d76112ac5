"""Appends by HTTP and by datagram, and records larger than a batch.

Begin with `producer`; `sender` keeps one partition's batches in order.
"""
