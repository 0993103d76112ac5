"""Commits over several partitions, and records larger than a batch.

Begin with `coordinator`; `participant` is what each partition's leader does.
"""
