"""Routes for operators: topics, nodes, replicas, health, metrics, and decisions about lost replicas."""
