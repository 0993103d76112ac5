"""Metrics of a node: their names, their collection from all processes, and their text."""
