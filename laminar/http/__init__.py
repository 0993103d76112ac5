"""The HTTP/1.1 wire protocol of Laminar, both ends, and what its bodies mean.

Nothing here knows of nodes, Raft or files: a server is handed an `Application`,
the payload modules turn bodies into records and frames into bodies, and one
table of errors and one of routes make the answers, the documentation and the
client's exceptions. Importing this package loads none of its modules.
"""
