"""Layer by layer: compute with the notes that have come, while the others are underway.

A block's bytes are [cache layers, block_size, entry_width], so its i-th slice is layer i. Attention
in layer i reads layer i only. So a step can begin when the first layer of all blocks is here:

    in turn      load 0  load 1  load 2  compute 0  compute 1  compute 2
    overlapped   load 0  load 1  load 2
                         compute 0  compute 1  compute 2

`LayerPull` fetches a ticket's blocks in that order, straight into a cache, and `ArrivingNotes` is
a KV cache for the model that waits for a layer when it is first read. (vLLM's connectors have the
same hook before each layer's attention.) A step that waits keeps all its requests waiting, so the
decode worker, which serves many, pulls whole blocks, or layers, beside its steps instead.
"""

from collections.abc import Callable, Sequence

import torch

from ..cache.paged import PagedCache, PagedStep
from ..model.batch import Batch, Part
from .links import Link
from .messages import Block, MessageError, Read, Refused, Ticket, pack, unpack
from .worker import HandoffError


class LayerPull:
    """A ticket's blocks on their way into `blocks` of a cache: the first layer first.

    `pause` is called whenever nothing has come. After `retry_s` without a slice, those of the
    layer that is waited for are asked for again; after `patience_s`, HandoffError is raised.
    """

    def __init__(self, link: Link, ticket: Ticket, cache: PagedCache, blocks: Sequence[int], *,
                 clock: Callable[[], float], pause: Callable[[], None],
                 retry_s: float = 0.5, patience_s: float = 5.0):
        self.link, self.ticket, self.cache = link, ticket, cache
        self.clock, self.pause, self.retry_s, self.patience_s = clock, pause, retry_s, patience_s
        self.block_of = dict(zip(ticket.keys, blocks, strict=True))
        self.theirs = dict(zip(ticket.keys, ticket.block_ids, strict=True))
        self.layers = cache.blocks.shape[1]
        self.missing = [dict.fromkeys(ticket.keys) for _ in range(self.layers)]
        for layer in range(self.layers):
            self._ask(layer)

    def wait_for(self, layer: int) -> None:
        """Return when all blocks have this layer. Raises HandoffError if they will not."""
        heard_at = asked_at = self.clock()
        while self.missing[layer]:
            now = self.clock()
            if self._take_in():
                heard_at = now
            elif self.link.is_lost(self.ticket.worker) or now - heard_at > self.patience_s:
                raise HandoffError(f"layer {layer} of {len(self.missing[layer])} blocks did not "
                                   "come: compute them")
            elif now - max(asked_at, heard_at) > self.retry_s:
                self._ask(layer)
                asked_at = now
            else:
                self.pause()

    def _ask(self, layer: int) -> None:
        ticket, keys = self.ticket, tuple(self.missing[layer])
        if keys:
            self.link.send(ticket.worker, pack(Read(
                ticket.request_id, ticket.epoch, ticket.fingerprint, keys,
                tuple(self.theirs[key] for key in keys), layer, self.layers)))

    def _take_in(self) -> int:
        """Put what has come where it belongs; how many slices were new."""
        count = 0
        for sender, data in self.link.receive():
            try:
                message = unpack(data)
            except MessageError:
                continue
            if sender == self.ticket.worker and isinstance(message, Block | Refused) and (
                    message.request_id, message.epoch) == (self.ticket.request_id,
                                                           self.ticket.epoch):
                count += self._place(message)
        return count

    def _place(self, message: Block | Refused) -> bool:
        if isinstance(message, Refused):
            raise HandoffError(message.reason)
        if message.parts != self.layers or message.key not in self.missing[message.part]:
            return False
        room = self.cache.bytes_of(self.block_of[message.key])
        size = len(room) // self.layers
        room[message.part * size:(message.part + 1) * size] = message.payload
        del self.missing[message.part][message.key]
        return True


class ArrivingNotes:
    """One step's notes, some of which are still underway: satisfies the KV protocol."""

    def __init__(self, step: PagedStep, pull: LayerPull):
        self.step, self.pull = step, pull

    def write(self, layer: int, entries: torch.Tensor, batch: Batch) -> None:
        self.step.write(layer, entries, batch)

    def read(self, layer: int, part: Part) -> torch.Tensor:
        self.pull.wait_for(layer)
        return self.step.read(layer, part)
