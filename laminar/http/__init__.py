"""HTTP/1.1 for Laminar: the client's connection, the server, and the API's routes, errors and bodies.

Nothing here knows of nodes, Raft or files. A server gets an `Application` that answers its requests. The
modules of `api` turn bodies into records and batches into bodies. One table of errors and one of routes are
the source of the answers, the documentation and the client's exceptions. Importing this package loads none of
its modules.
"""
