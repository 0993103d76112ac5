"""Routes of sinks and of producers' names, and the clean-up after transactions that were never committed."""
