"""One partition's log as its replica sees it: its entries, and how they are read.

Begin with `log`, which takes the changes. `entries` finds entries, `reads` reads their frames.
"""
