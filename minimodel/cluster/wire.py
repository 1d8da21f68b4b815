"""Links between processes: the messages of `links.py` over `torch.distributed`.

For each other rank, one thread sends what was queued and one receives what comes, so the worker
itself never waits for anybody. All that waits in a queue goes as one parcel, since each sending
has its price: first the parcel's length, then the messages, each behind its own length. If a rank
is slow to receive, its queue fills, and further messages to it are lost, which links may do. When
a rank's connection breaks, it counts as lost.

The group is a gloo group of its own with no timeout: that nothing comes for an hour is no error,
and who waits for what, and how long, is the protocol's business.
"""

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

MOST_WAITING = 2_048            # messages to one rank
PARCEL_BYTES = 1 << 20          # no further message is added to a parcel of this size
MOST_BYTES = 1 << 30            # of one parcel; more is no length, but noise
LENGTH = struct.Struct("<I")


class TorchLink:
    """This rank's end. All ranks of the world must make theirs at the same time."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        self.lost: set[int] = set()
        self.hanging_up: set[int] = set()
        self.come: deque[tuple[int, bytes]] = deque()
        self.something_came = threading.Event()
        self.num_dropped = self.num_bytes = 0
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        self.outgoing = {rank: queue.Queue(MOST_WAITING) for rank in others}
        self.threads = [threading.Thread(target=work, args=(rank,), daemon=True)
                        for rank in others for work in (self._send_all, self._receive_all)]
        for thread in self.threads:
            thread.start()

    def send(self, to: int, data: bytes) -> None:
        """Queue a message; it is lost if the other rank is, or does not keep up."""
        try:
            if to not in self.lost:
                self.outgoing[to].put_nowait(data)
        except queue.Full:
            self.num_dropped += 1

    def receive(self) -> list[tuple[int, bytes]]:
        self.something_came.clear()
        come = []
        while self.come:
            come.append(self.come.popleft())
        return come

    def is_lost(self, name: int) -> bool:
        return name in self.lost

    def wait(self, timeout_s: float) -> None:
        """Sleep until something comes, but not for longer than this."""
        self.something_came.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is queued, hang up, and wait for the others to do so, too."""
        for waiting in self.outgoing.values():
            try:
                waiting.put(b"", timeout=timeout_s)
            except queue.Full:
                self.num_dropped += 1
        ends_at = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(0.0, ends_at - time.monotonic()))

    # --- one thread each ------------------------------------------------------------------

    def _send_all(self, rank: int) -> None:
        try:
            while (parcel := self._next_parcel(rank)):
                dist.send(torch.tensor([len(parcel)]), rank, self.group)
                dist.send(torch.frombuffer(parcel, dtype=torch.uint8), rank, self.group)
                self.num_bytes += len(parcel)
            dist.send(torch.tensor([0]), rank, self.group)
        except (RuntimeError, ValueError):
            self._lose(rank)

    def _next_parcel(self, rank: int) -> bytearray:
        """What waits for a rank, or will. Empty if the next thing to do is to hang up."""
        waiting, parcel = self.outgoing[rank], bytearray()
        while rank not in self.hanging_up and (
                not parcel or (len(parcel) < PARCEL_BYTES and not waiting.empty())):
            if (data := waiting.get()):
                parcel += LENGTH.pack(len(data)) + data
            else:
                self.hanging_up.add(rank)       # after this parcel
        return parcel

    def _receive_all(self, rank: int) -> None:
        """Until the other hangs up, with a parcel of no bytes, or is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                dist.recv(length, rank, self.group)
                if not 0 < length.item() <= MOST_BYTES:
                    break
                data = torch.empty(length.item(), dtype=torch.uint8)
                dist.recv(data, rank, self.group)
                self.come.extend((rank, message) for message in unpacked(data.numpy()))
                self.something_came.set()
        except (RuntimeError, ValueError):
            pass
        self._lose(rank)

    def _lose(self, rank: int) -> None:
        self.lost.add(rank)
        self.something_came.set()


def unpacked(parcel: np.ndarray) -> Iterator[bytes]:
    """The messages in a parcel."""
    first = 0
    while first < len(parcel):
        (length,) = LENGTH.unpack_from(parcel, first)
        first += LENGTH.size
        yield parcel[first:first + length].tobytes()
        first += length
