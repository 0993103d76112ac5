"""The source: which records a query's batches hold, and how its tasks read them."""
