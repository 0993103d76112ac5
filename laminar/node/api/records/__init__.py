"""Routes of records: append, read, delete; idempotency, producers' progress, datagrams, large records."""
