"""The HTTP partition API of a shard: what each route does, and who does it when it isn't this shard."""
