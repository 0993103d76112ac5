"""Fair shares of one event loop: large appends wait, so that small appends and Raft do not.

The module `bulk` explains it.
"""
