"""`laminar bench`: what a cluster does under a load that keeps to a schedule, as a program meets it.

The load is *open*: record n is due at a time that does not depend on how fast the cluster answers, and its
latency counts from then. So records that had to wait behind a slow one have waited in the figures, too.
"""
