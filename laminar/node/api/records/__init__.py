"""Routes of records: append, read, delete; producers' progress, datagrams, uploads of large records."""
