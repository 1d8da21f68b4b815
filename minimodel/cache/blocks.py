"""The block pool: who holds which block of KV memory. Numbers only, no tensors.

Memory is cut into blocks of `block_size` tokens, all layers. A request holds a *block table*:
its tokens' blocks, in order, wherever in memory they lie. The life of a block:

1. it lies in the free list, which is kept in the order of eviction;
2. `admit` and `grow` take it from the front of that list into a table;
3. tables that share it each count as one reference (`admit` with hits, `fork`);
4. `publish` gives a full block a key, by which later requests can find it;
5. `release` gives up a table's references, last block first. A block that nobody holds goes
   back into the free list: to the back if it has a key (it may be wanted again), to the front
   if not. Its notes stay until it is taken again; only then is its key forgotten.

So a free block with a key is a cache, and memory that is kept for later costs nothing now.
After vLLM's block pool (arXiv 2309.06180, section 4), much simplified.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol


class BlockTable(list[int]):
    """A request's blocks, in the order of its tokens. Tables are told apart by identity."""

    __hash__, __ne__ = object.__hash__, object.__ne__

    def __eq__(self, other) -> bool:
        return self is other


class Listener(Protocol):
    """Who wants to hear what can be found in a pool, and what no longer."""

    def stored(self, key: Hashable) -> None: ...

    def removed(self, key: Hashable) -> None: ...


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, lent out to tables."""

    def __init__(self, num_blocks: int, block_size: int = 16):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing: "
                             "both must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.block_of: dict[Hashable, int] = {}         # by key
        self.key_of: dict[int, Hashable] = {}           # by block: the same pairs, turned around
        self.tables: set[BlockTable] = set()
        self.num_evicted = 0                            # keys forgotten to make room
        self.listener: Listener | None = None           # a router, say

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    # --- taking ---------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Hashable]) -> list[int]:
        """The blocks of the longest known beginning of a chain of keys. Nothing is held yet."""
        hits = []
        for key in keys:
            if (block := self.block_of.get(key)) is None:
                break
            hits.append(block)
        return hits

    def admit(self, hits: Sequence[int], num_new: int, spare: int = 0) -> BlockTable | None:
        """A table of the found blocks and `num_new` others, if `spare` more stay free. None, and
        nothing changed, if there are too few.

        All hits are held before any block is taken: else a hit could be taken for new tokens.
        """
        if num_new < 0 or len(set(hits)) < len(hits):
            raise ValueError(f"num_new={num_new} must be at least 0, and hits={hits} must name no "
                             "block twice: no table may")
        idle_hits = sum(1 for block in hits if not self.references[block])
        if num_new + spare > len(self.free) - idle_hits:
            return None
        table = BlockTable(hits)
        for block in hits:
            self._hold(block)
        table.extend(self._take() for _ in range(num_new))
        self.tables.add(table)
        return table

    def grow(self, table: BlockTable) -> bool:
        """Append one block to a table. False, and nothing changed, if none is free."""
        self._require(table)
        if not self.free:
            return False
        table.append(self._take())
        return True

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks: another answer to the same prompt."""
        self._require(table)
        twin = BlockTable(table)
        for block in twin:
            self._hold(block)
        self.tables.add(twin)
        return twin

    def writable(self, table: BlockTable, place: int, copy: Callable[[int, int], None]) -> bool:
        """Make a table's block its own before it is written: copy on write.

        A block that others hold too, or that is published, is copied by `copy(source, target)`
        into one of the table's own, and held until that is done. False if none is free.
        """
        self._require(table)
        source = table[place]
        if self.references[source] == 1 and source not in self.key_of:
            return True
        if not self.free:
            return False
        target = self._take()
        try:
            copy(source, target)
        except BaseException:
            self._let_go(target)
            raise
        table[place] = target
        self._let_go(source)
        return True

    # --- giving ---------------------------------------------------------------------------

    def publish(self, table: BlockTable, keys: Sequence[Hashable], num_full: int) -> None:
        """Let others find the table's first `num_full` blocks, which are full, by these keys.

        The first to publish a key wins. A later block of the same content stays without a key,
        and its table keeps it: tables never change under a running request.
        """
        self._require(table)
        if not 0 <= num_full <= min(len(table), len(keys)):
            raise ValueError(f"num_full={num_full} blocks to publish, of a table of {len(table)} "
                             f"and {len(keys)} keys: publish only what is there")
        for block, key in zip(table[:num_full], keys, strict=False):
            if key not in self.block_of and block not in self.key_of:
                self.block_of[key] = block
                self.key_of[block] = key
                if self.listener:
                    self.listener.stored(key)

    def release(self, table: BlockTable) -> None:
        """Give a table's blocks back, the last first, so that a chain is evicted from its end."""
        self._require(table)
        self.tables.remove(table)
        for block in reversed(table):
            self._let_go(block)
        table.clear()

    def forget(self) -> None:
        """Drop all keys: nothing can be found any more (the weights changed, say).

        Raises ValueError while tables are held: whoever runs would publish old notes again.
        """
        if self.tables:
            raise ValueError(f"tables still held: {len(self.tables)}. Release them all before keys "
                             "are forgotten")
        for block in list(self.key_of):
            self._unpublish(block)

    # --- one block ------------------------------------------------------------------------

    def _hold(self, block: int) -> None:
        if not self.references[block]:
            del self.free[block]
        self.references[block] += 1

    def _take(self) -> int:
        """The free block that is evicted first; whoever published it can find it no more."""
        block, _ = self.free.popitem(last=False)
        if block in self.key_of:
            self._unpublish(block)
            self.num_evicted += 1
        self.references[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        key = self.key_of.pop(block)
        del self.block_of[key]
        if self.listener:
            self.listener.removed(key)

    def _let_go(self, block: int) -> None:
        self.references[block] -= 1
        if not self.references[block]:
            self.free[block] = None
            if block not in self.key_of:
                self.free.move_to_end(block, last=False)

    def _require(self, table: BlockTable) -> None:
        if table not in self.tables:
            raise ValueError("this table is not (or no longer) one of the pool's: it was released, "
                             "or belongs to another pool")

    # --- looking --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for, exactly once."""
        holders = Counter(block for table in self.tables for block in table)
        for block in range(self.num_blocks):
            held, counted = holders[block], self.references[block]
            assert held == counted, f"block {block} is in {held} tables but counts {counted}"
            assert (block in self.free) == (counted == 0), (
                f"block {block} with {counted} references is on the wrong side of the free list")
        for table in self.tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {list(table)}"
        assert {(key, block) for block, key in self.key_of.items()} == set(self.block_of.items()), (
            "keys and blocks do not point at each other")

    def stats(self) -> dict[str, int]:
        """Blocks held, free, and free but still findable; keys forgotten so far."""
        return {"blocks": self.num_blocks, "held": self.num_blocks - len(self.free),
                "free": len(self.free), "cached": sum(b in self.key_of for b in self.free),
                "shared": sum(count > 1 for count in self.references),
                "evicted": self.num_evicted}
