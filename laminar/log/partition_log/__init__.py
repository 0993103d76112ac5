"""One partition's log as its replica sees it: what it holds, and how that is read.

Begin with `log`; `lookups` and `reads` are its other two parts.
"""
