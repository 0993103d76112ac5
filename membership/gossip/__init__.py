"""Gossip (SWIM): which members of the cluster seem alive, as a hint.

Begin with `swim`, the pure core; `gossip` runs it over UDP.
"""
