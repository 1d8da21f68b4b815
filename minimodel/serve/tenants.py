"""Who is asking: API keys, and what the server knows of the tenant behind each.

A tenant's salt begins all of its chains of block keys, so tenants find nothing of each other's
in the cache, and cannot learn from a fast answer what another has sent. The salt comes from this
table, never from a request: a salt that a client may choose, another client may copy (vLLM
PR 17045, PR 53347). It is made of the tenant's name, so it stays the same when a key is changed
or the server starts again, and what is on disk is found again.

The table is a file with a line for each key: the key, the tenant's name, and, if it is not
`chat`, for how long the tenant's notes are kept on disk.

    # key           tenant    retention
    sk-3f9a...      ann
    sk-77c1...      ann                     another key of the same tenant
    sk-0b5e...      robot     agent
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..cache.store_index import retention_of
from .errors import ApiError


@dataclass(frozen=True)
class Tenant:
    """Whose request it is: a name, and how long the store keeps what it leaves."""

    name: str = ""
    retention: str = "chat"

    def __post_init__(self):
        retention_of(self.retention)

    @property
    def salt(self) -> bytes:
        return self.name.encode()


class Tenants:
    """The tenants by their keys. Without any key, whoever asks is one and the same tenant."""

    def __init__(self, by_key: Mapping[str, Tenant] | None = None):
        # By digests: a look-up takes as long for a key that is nearly right as for any other.
        self.by_digest = {digest(key): tenant for key, tenant in (by_key or {}).items()}

    def of(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises ApiError if a key is needed."""
        if not self.by_digest:
            return Tenant()
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self.by_digest.get(digest(key.strip()))
        if scheme.lower() != "bearer" or tenant is None:
            what = "this API key is unknown" if authorization else "there is no API key"
            raise ApiError(401, f"{what}: send a header 'Authorization: Bearer KEY' with a key of "
                           "this server", "invalid_api_key",
                           headers={"www-authenticate": "Bearer"})
        return tenant


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_tenants(path: Path) -> Tenants:
    """The table in a file. Raises ValueError where it is not as it should be."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the API keys in {path}: {error}. Give a text file with a "
                         "line 'KEY TENANT' for each key") from error
    by_key: dict[str, Tenant] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            try:
                add_tenant(by_key, words)
            except ValueError as error:         # which never says the key itself
                raise ValueError(f"line {number} of {path}: {error}") from None
    if not by_key:
        raise ValueError(f"{path} holds no API key: write a line 'KEY TENANT' for each")
    return Tenants(by_key)


def add_tenant(by_key: dict[str, Tenant], words: list[str]) -> None:
    if len(words) not in (2, 3):
        raise ValueError(f"{len(words)} words, and a line is KEY TENANT or KEY TENANT RETENTION")
    key, *what = words
    if key in by_key:
        raise ValueError("this key stands here already: give each key one line")
    by_key[key] = Tenant(*what)
