"""The support bundle: a report of a node's state, without data or secrets, for people who help operators."""
