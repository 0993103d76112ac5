"""Logs in a user's own program, without server or cluster.

Begin with `folder` (`open_log`, `open_folder`); `local_log` is one log of a folder.
"""
