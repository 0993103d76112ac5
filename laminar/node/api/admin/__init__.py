"""Routes for operators: drain or remove nodes, pin partitions, prefer leaders, list changes under way."""
