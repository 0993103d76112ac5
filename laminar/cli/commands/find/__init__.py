"""Commands that look into records, and change nothing."""
