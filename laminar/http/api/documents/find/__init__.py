"""Documents of searches, and of the histories of single records."""
