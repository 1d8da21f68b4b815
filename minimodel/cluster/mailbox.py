"""Messages from one process to another, in order, through a store where both look.

The store is that of `torch.distributed` in which ranks meet. It is not in the group: when a rank
dies and no collective works any more, the others can still be spoken to.
"""

import pickle
from typing import Any, Protocol

MOST_BYTES = 8 << 20            # a TCPStore hangs up on who sends it more
PAUSE_S = 0.002                 # with nothing there, look again after this


class Store(Protocol):
    """What is used of `torch.distributed.TCPStore`."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Mailbox:
    """One direction: one process puts messages in, one takes them out."""

    def __init__(self, store: Store, name: str):
        self.store, self.name = store, name
        self.num_put = self.num_taken = 0

    def put(self, message: Any) -> None:
        """Raises ValueError for a message that the store would not take."""
        payload = pickle.dumps(message)
        if len(payload) > MOST_BYTES:
            raise ValueError(f"a message of {len(payload):,} bytes is over the {MOST_BYTES:,} that "
                             "the store takes: give a shorter prompt")
        self.store.set(f"{self.name}/{self.num_put}", payload)
        self.num_put += 1

    def take(self) -> list[Any]:
        """All messages that are there, the oldest first."""
        messages = []
        while self.store.check([key := f"{self.name}/{self.num_taken}"]):
            messages.append(pickle.loads(self.store.get(key)))
            self.store.delete_key(key)
            self.num_taken += 1
        return messages
