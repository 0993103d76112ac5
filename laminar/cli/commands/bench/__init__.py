"""`laminar bench`: the rates and latencies of a cluster under a load with a schedule, as a client sees them.

The load is *open*: record n is due at a time that does not depend on how fast the cluster answers, and its
latency counts from then. So a record that waits because an earlier one was slow has that wait in its latency.
"""
