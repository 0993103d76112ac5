"""Changes of a topic's route: their effect on its partitions, and the steps of a change under way."""
