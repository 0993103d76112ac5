"""The audit: admins' calls and refused requests, as lines of the node's log and records of `_audit`."""
