"""One replica of a partition: what is appended, who waits for it, and what readers may see.

Begin with `partition`.
"""
