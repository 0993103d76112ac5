"""The web console: the files that a browser loads, and nothing of what they show.

The pages are hand-written modules in `web`, which call the public HTTP API of the node that they came from.
"""
