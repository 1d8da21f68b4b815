"""Block keys: when are two prompts the same?

A token's notes depend on the token and on everything before it. So a block may be used again
only where the whole text up to its end is the same, and the model that computed it, too. The
key of a block says all of that in 32 bytes, each made from the one before:

    root   = sha256(tag, fingerprint, salt)             the model, the cache's layout, the tenant
    key 0  = sha256(root,  tokens  0 .. 15)
    key 1  = sha256(key 0, tokens 16 .. 31)             names 32 tokens, not 16

Equal keys mean equal beginnings: from the first block on that differs, all keys differ. Only
full blocks have keys. The last token of a prompt is never looked up, since its logits must be
computed anyway: of n tokens at most floor((n - 1) / block_size) blocks can be found.

Python's own `hash` would not do: it is 64 bits wide, another one in each process for texts, and
prompts with equal ones can be made on purpose (vLLM PR 12621).
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict

from ..config import ModelConfig

KEY_BYTES = 32
SCHEMA = 1              # raised when blocks or records of the same model change their meaning


def fingerprint(config: ModelConfig, weights_digest: str, block_size: int, dtype: str) -> str:
    """What notes depend on besides the tokens, as 64 hexadecimal digits.

    The weights and every size of the model (rotary settings among them), the numbers' type and
    byte order (`dtype`, such as "float32 little"), how entries lie in a block. Notes of one
    fingerprint mean nothing under another.
    """
    sizes = {name: size if isinstance(size, tuple) else float(size)     # 1 and 1.0 are equal
             for name, size in asdict(config).items()}
    facts = {"schema": SCHEMA, "config": sizes, "weights": weights_digest,
             "block": [len(config.cache_layers), block_size, config.entry_width], "dtype": dtype}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def root_key(fingerprint: str, salt: bytes = b"") -> bytes:
    """What every chain of a model and a tenant begins with.

    Tenants with different salts share nothing, and cannot learn from a fast answer what others
    have sent. The service gives each its salt; nobody chooses their own (vLLM PR 17045).
    """
    if not isinstance(salt, bytes):
        raise TypeError(f"salt={salt!r} must be bytes: encode a text first")
    head = b"second-send" + bytes.fromhex(fingerprint)
    return hashlib.sha256(head + struct.pack("<Q", len(salt)) + salt).digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block of these tokens that follows the block with key `previous`."""
    return hashlib.sha256(previous + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of all full blocks of a text."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1")
    keys, key = [], root
    for first in range(0, len(tokens) - block_size + 1, block_size):
        key = next_key(key, tokens[first:first + block_size])
        keys.append(key)
    return keys


def most_hits(num_tokens: int, block_size: int) -> int:
    """How many blocks of so many tokens may be found: one token is always left to compute."""
    return max(0, num_tokens - 1) // block_size
