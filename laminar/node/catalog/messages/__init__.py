"""The messages between the processes of the nodes and the catalog's leader."""
