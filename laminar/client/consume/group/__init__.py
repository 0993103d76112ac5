"""A program as a member of a consumer group.

Begin with `subscription`.
"""
