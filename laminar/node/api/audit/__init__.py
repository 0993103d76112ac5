"""The audit: what admins did and who was refused, as lines of the log and records of `_audit`."""
