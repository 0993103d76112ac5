"""Changes of a topic's route (partitions are split, merged or moved): their effects, and their next steps."""
