"""Documents of what looks into records: searches, and histories of single ones."""
