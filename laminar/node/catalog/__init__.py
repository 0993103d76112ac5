"""The controller and group 0: topics, nodes and the placement of replicas, as the cluster has agreed.

Begin with `controller`, the process, and `group`, the replicated state machine.
"""
