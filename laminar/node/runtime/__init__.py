"""What controller and shards share: sockets, data folder, storage, transport and driver.

Begin with `boot`, what a supervisor gives its child, and `process`, what the child makes of it.
"""
