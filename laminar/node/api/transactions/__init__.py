"""Routes of sinks and of producers' names, and the removal of stages that were never committed."""
