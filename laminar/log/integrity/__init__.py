"""Damage inside logs: found by reading all segments again, recorded, and repaired.

`scrubber` finds damage; `damage_registry` records it and writes intact bytes in its place.
"""
