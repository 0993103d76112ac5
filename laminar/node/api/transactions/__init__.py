"""Routes of sinks, and of producers' names; batches that were staged and never committed."""
