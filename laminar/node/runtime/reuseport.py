"""The choice among a port's sockets: two classic-BPF programs that the supervisor gives to the kernel.

Each shard has one socket in the `SO_REUSEPORT` group of a port, and a classic-BPF program
(`SO_ATTACH_REUSEPORT_CBPF`), which needs no privilege, answers with the number of a socket: its position in
the kernel's list of the group, which is the order in which they were bound (TCP: began to listen). The
arithmetic is that of `router.ownership`; tests compare both with the same vectors. Nothing here opens a
socket.

Classic BPF has two 32-bit registers (A and X), sixteen words of scratch memory, and jumps forward only. So
the choice of a datagram's owner has no loop, but repeats its lines for each shard. A load from beyond the
packet's end ends the program with 0: a datagram that is too short goes to shard 0.
"""

from __future__ import annotations

import ctypes
import socket
import struct

_SO_ATTACH_REUSEPORT_CBPF = 51  # linux/socket.h; Python's socket module does not name it
_SKF_NET_OFF = 0x1_0000_0000 - 0x100000  # linux/filter.h: loads relative to the network header, as u32
_IPV6_HEADER_SIZE = 40

# linux/bpf_common.h and linux/filter.h, as sums of class, size or operation, and mode or source.
_LOAD_BYTE, _LOAD_WORD, _LOAD_HALF_AT_X = 0x30, 0x20, 0x48
_LOAD_NUMBER, _LOAD_SCRATCH, _SET_X, _SET_X_FROM_SCRATCH = 0x00, 0x60, 0x01, 0x61
_STORE, _COPY_TO_X, _COPY_FROM_X = 0x02, 0x07, 0x87
_ADD, _MULTIPLY, _MODULO, _AND = 0x04, 0x24, 0x94, 0x54
_OR_X, _XOR, _XOR_X, _SHIFT_LEFT, _SHIFT_RIGHT = 0x4C, 0xA4, 0xAC, 0x64, 0x74
_IF_EQUAL, _IF_ABOVE_X, _GO_ON, _ANSWER_A = 0x15, 0x2D, 0x05, 0x16

HASH_POSITION = 4
"""Position of the partition hash in a datagram, a big-endian u32 after the magic."""

_U32 = 0xFFFFFFFF

_Line = tuple[int, int, int, int]
"""Operation, lines to skip if true, lines to skip if false, constant."""


def choose_by_source_port(sock: socket.socket, shards: int) -> None:
    """Tell the kernel to give a connection to the listening socket `(source port >> 1) mod shards`."""
    _attach(sock, source_port_program(shards))


def choose_by_partition(sock: socket.socket, shards: int) -> None:
    """Tell the kernel to give a datagram to the socket of the shard that owns the partition hash in it."""
    _attach(sock, partition_program(shards))


def source_port_program(shards: int) -> bytes:
    """Return a BPF program that computes `router.shard_of_source_port`: `struct sock_filter`s of 8 bytes.

    The program's offsets begin after the TCP header, so it reads everything relative to the network header.
    """
    return _assembled(
        [
            (_LOAD_BYTE, 0, 0, _SKF_NET_OFF),
            (_SHIFT_RIGHT, 0, 0, 4),
            (_IF_EQUAL, 5, 0, 6),  # version 6: to the line that sets X
            (_LOAD_BYTE, 0, 0, _SKF_NET_OFF),
            (_AND, 0, 0, 0x0F),  # IPv4 header length in words: with options it is more than 5
            (_SHIFT_LEFT, 0, 0, 2),
            (_COPY_TO_X, 0, 0, 0),
            (_GO_ON, 0, 0, 1),
            (_SET_X, 0, 0, _IPV6_HEADER_SIZE),
            (_LOAD_HALF_AT_X, 0, 0, _SKF_NET_OFF),  # the TCP source port
            (_SHIFT_RIGHT, 0, 0, 1),
            (_MODULO, 0, 0, shards),
            (_ANSWER_A, 0, 0, 0),
        ]
    )


def partition_program(shards: int) -> bytes:
    """Return a BPF program that computes `router.owner_shard` of the partition hash in a datagram.

    The program's offsets begin at the payload. mmh3 (x86, 32 bits, seed 0) of eight bytes is two blocks and a
    finish. The first block is the partition hash: its effect on the state is computed once. The second is the
    shard's number, so its mixed value is a constant of the program. mmh3 rotates the XOR of state and block;
    here both are rotated before the XOR, which gives the same.
    """
    assert shards >= 1, f"{shards} shards"
    state, highest, owner, half = 0, 1, 2, 3  # places in scratch memory
    lines: list[_Line] = [
        (_LOAD_WORD, 0, 0, HASH_POSITION),
        (_MULTIPLY, 0, 0, _C1),
        *_rotate_left(15, scratch=half),
        (_MULTIPLY, 0, 0, _C2),
        *_rotate_left(13, scratch=half),
        (_MULTIPLY, 0, 0, 5),
        (_ADD, 0, 0, _N),
        *_rotate_left(13, scratch=half),
        (_STORE, 0, 0, state),
    ]
    for shard in range(shards):
        lines += [
            (_LOAD_SCRATCH, 0, 0, state),
            (_XOR, 0, 0, _rotated(_block(shard), 13)),
            (_MULTIPLY, 0, 0, 5),
            (_ADD, 0, 0, _N),
            (_XOR, 0, 0, 8),  # the length in bytes
            *_xor_shifted(16),
            (_MULTIPLY, 0, 0, 0x85EBCA6B),
            *_xor_shifted(13),
            (_MULTIPLY, 0, 0, 0xC2B2AE35),
            *_xor_shifted(16),
        ]
        if shard:
            # Only if it is above the highest so far: of equal ones the lower shard wins.
            lines += [(_SET_X_FROM_SCRATCH, 0, 0, highest), (_IF_ABOVE_X, 0, 3, 0)]
        lines += [(_STORE, 0, 0, highest), (_LOAD_NUMBER, 0, 0, shard), (_STORE, 0, 0, owner)]
    lines += [(_LOAD_SCRATCH, 0, 0, owner), (_ANSWER_A, 0, 0, 0)]
    return _assembled(lines)


# The constants of mmh3, x86 32 bits.
_C1, _C2, _N = 0xCC9E2D51, 0x1B873593, 0xE6546B64


def _rotated(number: int, bits: int) -> int:
    return (number << bits | number >> 32 - bits) & _U32


def _block(number: int) -> int:
    """Return a block of four bytes as mmh3 mixes it before it meets the state."""
    return _rotated(number * _C1 & _U32, 15) * _C2 & _U32


def _rotate_left(bits: int, *, scratch: int) -> list[_Line]:
    """Return the lines that rotate A; X and a word of scratch memory are used up."""
    return [
        (_COPY_TO_X, 0, 0, 0),
        (_SHIFT_LEFT, 0, 0, bits),
        (_STORE, 0, 0, scratch),
        (_COPY_FROM_X, 0, 0, 0),
        (_SHIFT_RIGHT, 0, 0, 32 - bits),
        (_SET_X_FROM_SCRATCH, 0, 0, scratch),
        (_OR_X, 0, 0, 0),
    ]


def _xor_shifted(bits: int) -> list[_Line]:
    """Return the lines for A ^ A >> bits; X is used up."""
    return [(_COPY_TO_X, 0, 0, 0), (_SHIFT_RIGHT, 0, 0, bits), (_XOR_X, 0, 0, 0)]


def _assembled(lines: list[_Line]) -> bytes:
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _attach(sock: socket.socket, program: bytes) -> None:
    filters = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and a pointer to them.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(filters))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, header)
