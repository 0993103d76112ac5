"""The XDP program that brings a packet to the CPU of the shard it is meant for, and its management.

Which shard's *socket* gets a connection is decided without any privilege, by the classic BPF program that
`laminar.node.runtime.reuseport` attaches to the shared port. The XDP program (`steer.c`, compiled with BCC)
adds the choice of the CPU (*steering*): the kernel processes a packet on the CPU of the process that
receives it. The
arithmetic that names the shard is `router`'s, written once more in C (`ownership.h`); tests compare the two.

`layout` defines the contents of the program's maps (BPF maps: tables that the kernel and processes share),
`toolchain` compiles the program, `loader` attaches it and lets the nodes of one host share it, `shared` opens
the link and maps that they share, `status` reads these, and `requirements` checks what this machine lacks.
Client programs import nothing of this package.
"""
