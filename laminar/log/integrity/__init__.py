"""Damage inside logs: found by reading everything again, recorded, and repaired.

`scrubber` finds it; `damage_registry` records it and puts repaired bytes back.
"""
