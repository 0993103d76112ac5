"""The XDP program that brings a packet to the CPU of the shard it is meant for, and its management.

Which shard's *socket* gets a connection is decided without any privilege, by the classic BPF program that
`laminar.node.runtime.reuseport` attaches to the shared port. The XDP program (`steer.c`, compiled with BCC)
adds the choice of the CPU: a packet is processed where the process runs that waits for it. The arithmetic is
`router`'s, written once more in C (`ownership.h`) and held to it by tests.

`layout` defines the contents of the program's maps, `toolchain` compiles it, `loader` attaches it and lets
nodes share it, `shared` keeps what they share, `status` reads it, `requirements` checks what this machine
lacks. No user's program imports any of this.
"""
