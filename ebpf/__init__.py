"""The place of the XDP program that brings a packet to the CPU of the shard it is meant for.

Nothing in here runs yet, and nothing depends on it. Which shard's *socket* gets a connection is decided
without any privilege, by the classic BPF program that `laminar.node.sockets` attaches to the shared port.
The XDP program (C, loaded with BCC) adds the choice of the CPU; it comes with its own change and keeps the
same arithmetic, `router.shard_of_source_port`.
"""
