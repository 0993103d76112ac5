"""Placement: which nodes should hold and lead each partition, and the steps that lead there."""
