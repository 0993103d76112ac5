"""One partition's log as its replica sees it: what it holds, and how that is read.

Begin with `log`, which changes; `entries` finds, `reads` reads.
"""
