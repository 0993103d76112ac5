"""Transactions over several partitions, and uploads of records larger than a batch.

Begin with `coordinator`, which decides; `participant` carries out the steps in each partition.
"""
