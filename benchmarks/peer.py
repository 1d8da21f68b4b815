"""This package's engine behind the protocol of the harness that compares engines (`peerlib`).

    PYTHONPATH=PEERS python benchmarks/peer.py --model DIR --threads 1

PEERS is the harness's folder; its `run_peers.py --add "ours=..."` starts this as a worker. Both
are outside this repository: the benchmarks beside this file need neither.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from engines import Ours
from peerlib import Engine, serve

from minimodel.cache.keys import chain, root_key
from minimodel.cache.store import DiskStore


class Peer(Engine):
    """All prompts at once, greedy, stop tokens ignored; prefixes are found again until `clear`."""

    name = "ours"
    reuses_prefix = has_disk = True

    def __init__(self, model_dir, threads, tokens="16384"):
        torch.set_num_threads(threads)
        self.ours = Ours(model_dir, max_tokens=int(tokens), reuse=True)
        self.engine, self.prompt = self.ours.engine, []

    def generate(self, prompts, n_new):
        self.prompt = prompts[-1]
        return self.ours.generate(prompts, n_new)

    def clear(self):
        self.engine.pool.forget()
        self.engine.store = self.engine.scheduler.store = None

    def save_prefix(self, path):
        """The last prompt's full blocks, as they lie in the engine's memory."""
        keys = chain(root_key(self.engine.fingerprint), self.prompt, self.engine.cache.block_size)
        blocks = self.engine.pool.lookup(keys)
        payloads = [self.engine.cache.bytes_of(block) for block in blocks]
        self._open(path).save_chain(keys[:len(blocks)], payloads)

    def load_prefix(self, path):
        """Open the folder as the engine's store: the next prompt finds its blocks there."""
        self.engine.store = self.engine.scheduler.store = self._open(path)

    def _open(self, path):
        return DiskStore(path, self.engine.fingerprint)


if __name__ == "__main__":
    serve(Peer)
