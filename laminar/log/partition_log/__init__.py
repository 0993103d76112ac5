"""One partition's log as its replica sees it: its entries, and how they are read.

Begin with `log`, whose methods change a log. `entries` finds entries, `reads` reads their frames.
"""
