"""What a prefill and a decode worker say to each other, and how that becomes bytes.

    Prefill   read this prompt for me               the decode side asks
    Granted   done: here is your ticket             the prefill side answers,
    Declined  or: I will not, because               the same
    Read      send me these blocks                  decode
    Block     here is one, or one layer of it       prefill
    Beat      I still want them, keep them          decode
    Ack       I need nothing more, let them go      decode
    Refused   I do not have them (any more)         prefill
    Bye       nothing more will come                decode

A message on the wire:

    bytes   what
    4       magic "SSM1"
    4       CRC-32 of everything after this field
    4       length of the head
    ...     the head: kind and fields as JSON (bytes in hexadecimal)
    ...     the payload, in a Block: entries as they lie in memory

One Block holds one block, so each block has a checksum of its own. A message that was damaged
on its way is dropped, as if it were lost: whoever waits for it asks again.
"""

import json
import struct
import zlib
from dataclasses import dataclass, field

from ..engine.request import Sampling

MAGIC = b"SSM1"


class MessageError(ValueError):
    """Bytes that are no whole and undamaged message."""


@dataclass(frozen=True)
class Ticket:
    """The right to fetch a prompt's blocks from the worker that computed them.

    `keys` name the prompt's full blocks, `block_ids` say where they lie in that worker's memory.
    Times are that worker's: `expires_at` means something on its clock only, so others ask it.
    """

    request_id: str                 # the prefill worker's name for it,
    epoch: int                      # in this life of the worker
    worker: int | str               # whom to ask
    fingerprint: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    num_tokens: int                 # of the prompt
    first_token: int
    expires_at: float
    lease_s: float                  # how long a lease is: beats must come sooner
    num_found: int = 0              # tokens that the prefill worker had not to compute,
    num_loaded: int = 0             # of those from disk: for the bill


@dataclass(frozen=True)
class Prefill:
    number: int                     # the asker's own count: the answer repeats it
    prompt: tuple[int, ...]
    sampling: Sampling
    fingerprint: str
    salt: bytes = b""
    retention: str = "chat"


@dataclass(frozen=True)
class Granted:
    number: int
    ticket: Ticket


@dataclass(frozen=True)
class Declined:
    number: int
    reason: str


@dataclass(frozen=True)
class Read:
    """Part `part` of `parts` of some blocks: all of each (0 of 1), or layer 2 of 5, say."""

    request_id: str
    epoch: int
    fingerprint: str
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Block:
    request_id: str
    epoch: int
    key: bytes
    part: int
    parts: int
    payload: bytes = field(repr=False)


@dataclass(frozen=True)
class Beat:
    request_id: str
    epoch: int


@dataclass(frozen=True)
class Ack:
    request_id: str
    epoch: int


@dataclass(frozen=True)
class Refused:
    reason: str
    request_id: str
    epoch: int


@dataclass(frozen=True)
class Bye:
    pass


Message = Prefill | Granted | Declined | Read | Block | Beat | Ack | Refused | Bye
KINDS = {kind.__name__: kind for kind in (Ticket, Sampling, *Message.__args__)}


def pack(message: Message) -> bytes:
    head = json.dumps(message, default=_plain).encode()
    checked = struct.pack("<I", len(head)) + head + getattr(message, "payload", b"")
    return MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked


def unpack(data: bytes) -> Message:
    """The message in these bytes. Raises MessageError for whatever is not exactly one."""
    if len(data) < 12 or data[:4] != MAGIC:
        raise MessageError(f"{len(data)} bytes do not begin like a message")
    checksum, length = struct.unpack("<II", data[4:12])
    if zlib.crc32(memoryview(data)[8:]) != checksum:
        raise MessageError("a message is damaged: its checksum does not fit")
    payload = {"payload": data[12 + length:]} if 12 + length < len(data) else {}
    try:
        kind, fields = json.loads(data[12:12 + length])
        message = KINDS[kind](**{name: _rich(value) for name, value in fields.items()}, **payload)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MessageError(f"a message of another version: {error!r}") from None
    return message


def _plain(value):
    """Anything that JSON does not know, as [kind, fields] or [hex, digits]."""
    if isinstance(value, bytes):
        return ["hex", value.hex()]
    if isinstance(value, frozenset):
        return sorted(value)
    return [type(value).__name__,
            {name: part for name, part in vars(value).items() if name != "payload"}]


def _rich(value):
    """What `_plain` was given."""
    match value:
        case ["hex", str(digits)]:
            return bytes.fromhex(digits)
        case [str(kind), dict(fields)]:
            return KINDS[kind](**{name: _rich(part) for name, part in fields.items()})
        case list():
            return tuple(map(_rich, value))
    return value
