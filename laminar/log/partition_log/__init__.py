"""One partition's log as its replica sees it: what it holds, and how that is read.

Begin with `log`, which takes the changes. `entries` finds entries, `reads` reads their frames.
"""
