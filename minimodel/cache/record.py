"""A block's record: the bytes of one block as a file, and all that is needed to trust them.

    bytes        what
    4            magic "SSB1"
    4            CRC-32 of everything after this field
    8            created, seconds since 1970 (UTC)
    4            retention in seconds
    4            length of the payload
    32           the block's key
    32           the key of the block before it; zeros for a first block
    32           the fingerprint: which model's notes, of what shape and type
    ...          the payload: the block's entries as they lie in memory, little-endian

A reader knows which key it wants, of which fingerprint, and how long the payload must be. A
record that differs in any of it, or whose checksum does not fit, is no record: a file that was
cut, zeroed, damaged, given another's name or written by another model all fail the same way.
"""

import os
import struct
import zlib
from dataclasses import dataclass

from .keys import KEY_BYTES

MAGIC = b"SSB1"
CHECKED = struct.Struct(f"<QII{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
HEAD_BYTES = len(MAGIC) + 4 + CHECKED.size
NO_KEY = bytes(KEY_BYTES)


class RecordError(ValueError):
    """A file that is not the whole and undamaged record that was asked for."""


@dataclass(frozen=True)
class Header:
    created_s: int
    ttl_s: int              # how long after its last use the record is kept
    num_bytes: int          # of the payload
    key: bytes
    parent: bytes
    fingerprint: bytes

    def pack(self, payload) -> bytes:
        """The head of the record with this payload; the payload itself follows it."""
        checked = CHECKED.pack(self.created_s, self.ttl_s, self.num_bytes, self.key, self.parent,
                               self.fingerprint)
        return MAGIC + struct.pack("<I", zlib.crc32(payload, zlib.crc32(checked))) + checked

    @property
    def record_bytes(self) -> int:
        return HEAD_BYTES + self.num_bytes


def unpack(head: bytes) -> tuple[Header, int]:
    """A header and the checksum that goes with it. Raises RecordError if it cannot be one."""
    if len(head) != HEAD_BYTES or head[:4] != MAGIC:
        raise RecordError(f"begins with {bytes(head[:4])!r}, not with the {HEAD_BYTES} bytes of a "
                        f"record's head")
    return Header(*CHECKED.unpack(head[8:])), struct.unpack("<I", head[4:8])[0]


def write(path, header: Header, payload, last_used_s: float) -> None:
    """Write a new file. Raises FileExistsError rather than write into one that is there."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in (header.pack(payload), payload):
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(file, rest):]
        os.utime(file, (last_used_s, last_used_s))
    finally:
        os.close(file)


def read(path, key: bytes, fingerprint: bytes, into: memoryview) -> Header:
    """Read a payload into `into`, whose length it must have. Raises RecordError or OSError.

    The bytes go straight into the caller's memory and are checked there: after RecordError,
    `into` holds nothing that may be used.
    """
    head, beyond = bytearray(HEAD_BYTES), bytearray(1)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = fill(file, head, into, beyond)
    finally:
        os.close(file)
    if found != HEAD_BYTES + len(into):
        raise RecordError(f"has {found} bytes or more, not {HEAD_BYTES + len(into)}")
    header, checksum = unpack(bytes(head))
    if (header.key, header.fingerprint, header.num_bytes) != (key, fingerprint, len(into)):
        raise RecordError("is another block's record, or another model's")
    if zlib.crc32(into, zlib.crc32(head[8:])) != checksum:
        raise RecordError("is damaged: its checksum does not fit")
    return header


def fill(file: int, *buffers) -> int:
    """Read a file from its beginning until the buffers are full or it ends; how many bytes."""
    rest, found = [memoryview(buffer) for buffer in buffers], 0
    while rest and (count := os.preadv(file, rest, found)):     # fewer than there are is no end
        found += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]
    return found


def read_header(path) -> Header:
    """What a record says of itself. Nothing is checked but its form and its length."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header, _ = unpack(os.read(file, HEAD_BYTES))
        size = os.fstat(file).st_size
    finally:
        os.close(file)
    if size != header.record_bytes:
        raise RecordError(f"has {size} bytes, not {header.record_bytes}")
    return header
