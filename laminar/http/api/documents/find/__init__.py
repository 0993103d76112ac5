"""Documents of searches for records, of the histories of single records, and of the trace."""
