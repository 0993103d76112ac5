"""Operators' requests: nodes that are drained or removed, pins, preferred leaders, changes under way."""
