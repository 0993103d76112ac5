"""Changes of a topic's route: what they make of its partitions, and the steps of a change under way."""
