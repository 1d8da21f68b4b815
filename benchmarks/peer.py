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


class Peer(Engine):
    """All prompts at once, greedy, stop tokens ignored; nothing is remembered between calls."""

    name = "ours"

    def __init__(self, model_dir, threads, tokens="16384"):
        torch.set_num_threads(threads)
        self.ours = Ours(model_dir, max_tokens=int(tokens))

    def generate(self, prompts, n_new):
        return self.ours.generate(prompts, n_new)


if __name__ == "__main__":
    serve(Peer)
