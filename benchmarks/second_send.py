"""How much sooner the first token comes when a prompt is sent again: from memory, from disk.

    python benchmarks/second_send.py [--model DIR] [--lengths 513 2049 4097] [--rounds 5]
                                     [--threads 1] [--json]

One process sends fresh prompts, then the same ones again. A second process, which has loaded the
model and served something else, sends them once more: their notes are on disk, and in the
operating system's page cache. For a third process the system is asked to drop the records from
that cache first (`posix_fadvise`). Prompts have 16 k + 1 tokens, so that exactly one token is
computed: this is checked, and so are the answers; the exit code is 1 if either fails. Times are
medians over the prompts, from arrival to the first token; the notes are saved after that, in
the time shown as `save_ms`. About a minute.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from minimodel.cache.paged import PagedCache
from minimodel.cache.store import DiskStore
from minimodel.engine.engine import Engine, fingerprint_of, usage
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model import checkpoint

THREE = Sampling(max_tokens=3, stop_ids=frozenset())
AGAIN = 5                       # times that a prompt is sent again from memory


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.part:
        print(json.dumps(PARTS[options.part](options, options.lengths[0])))
        return 0
    results = [compare(options, length) for length in options.lengths]
    for result in results:
        report(result, options)
    return 0 if all(result["tokens_computed"] == 1 and result["same_tokens"]
                    for result in results) else 1


def compare(options: argparse.Namespace, length: int) -> dict:
    """All three processes, one length."""
    with tempfile.TemporaryDirectory() as folder:
        first = run_part("first", options, length, folder)
        warm = run_part("again", options, length, folder)
        drop_page_cache(Path(folder))
        cold = run_part("again", options, length, folder)
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*/*.kv"))
    first_ms = first["first_ms"]
    again_ms = {"memory": first["memory_ms"], "disk": warm["ms"], "disk_dropped": cold["ms"]}
    return {"prompt_tokens": length, "first_ms": first_ms, "save_ms": first["save_ms"],
            **{f"{name}_ms": found for name, found in again_ms.items()},
            **{f"{name}_ratio": round(first_ms / found, 1) for name, found in again_ms.items()},
            "tokens_computed": max(first["computed"], warm["computed"], cold["computed"]),
            "bytes": num_bytes // options.rounds,
            "same_tokens": first["same"] and first["tokens"] == warm["tokens"] == cold["tokens"]}


def run_part(part: str, options: argparse.Namespace, length: int, folder: str) -> dict:
    command = [sys.executable, __file__, "--part", part, "--folder", folder, "--lengths",
               str(length), "--rounds", str(options.rounds), "--threads", str(options.threads),
               "--model", str(options.model)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def drop_page_cache(folder: Path) -> None:
    """Ask for the records to leave memory. What is written only there must reach the disk first."""
    os.sync()
    for path in folder.glob("*/*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# --- in a process of its own -----------------------------------------------------------------


def send_twice(options: argparse.Namespace, length: int) -> dict:
    """Fresh prompts, and each of them again."""
    server, first, again, tokens = Server(options, length), [], [], []
    for prompt in prompts(length, options.rounds):
        first.append(server.send(prompt))
        again += [server.send(prompt) for _ in range(AGAIN)]
        tokens.append(first[-1]["tokens"])
    return {"first_ms": median(first, "ms"), "memory_ms": median(again, "ms"),
            "save_ms": median(first, "save_ms"), "tokens": tokens,
            "computed": max(one["computed"] for one in again),
            "same": all(one["tokens"] == tokens[i // AGAIN] for i, one in enumerate(again))}


def send_once(options: argparse.Namespace, length: int) -> dict:
    """The prompts that another process has sent."""
    server = Server(options, length)
    found = [server.send(prompt) for prompt in prompts(length, options.rounds)]
    assert all(one["disk_hits"] == length - 1 for one in found), "not all came from disk"
    return {"ms": median(found, "ms"), "tokens": [one["tokens"] for one in found],
            "computed": max(one["computed"] for one in found)}


PARTS = {"first": send_twice, "again": send_once}


class Server:
    """An engine with a store, which has served something already."""

    def __init__(self, options: argparse.Namespace, length: int):
        torch.set_num_threads(options.threads)
        model = checkpoint.load(options.model)
        num_blocks = (options.rounds + 1) * (length // 16 + 2)
        self.engine = Engine(model, PagedCache(model.config, num_blocks),
                             Limits(max_tokens_per_step=model.config.context),
                             store=DiskStore(options.folder, fingerprint_of(model)))
        rng = random.Random()                       # nobody has sent this before
        self.send([rng.randrange(256) for _ in range(length)], reuse=False)

    def send(self, prompt: list[int], **how) -> dict:
        before = self.engine.num_steps
        request = self.engine.submit(prompt, THREE, **how)
        self.engine.run()
        records = list(self.engine.records)[before:]
        return {"ms": 1e3 * (request.token_times_s[0] - request.arrived_s),
                "save_ms": 1e3 * sum(record.save_s for record in records),
                "computed": sum(share.num_tokens for record in records for share in record.shares
                                if share.kind == "prefill"),
                "disk_hits": usage(request).disk_hit_tokens, "tokens": request.output}


def prompts(length: int, count: int) -> list[list[int]]:
    """Random bytes; no two prompts begin alike, and all processes know the same ones."""
    rng = random.Random(f"second send/{length}")
    return [[i, *(rng.randrange(256) for _ in range(length - 1))] for i in range(count)]


def median(found: list[dict], name: str) -> float:
    return round(statistics.median(one[name] for one in found), 3)


def report(result: dict, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"benchmark": "second_send", "model": options.model.name,
                          "threads": options.threads, "torch": torch.__version__, **result}))
        return
    print(f"{result['prompt_tokens']:5} tokens: first {result['first_ms']:7.1f} ms"
          f" (+ {result['save_ms']:.1f} ms to save {result['bytes']:,} bytes); again, of memory "
          f"{result['memory_ms']:.2f} ms ({result['memory_ratio']:.0f} times sooner), of disk "
          f"{result['disk_ms']:.2f} ms ({result['disk_ratio']:.0f}), page cache dropped "
          f"{result['disk_dropped_ms']:.2f} ms ({result['disk_dropped_ratio']:.0f}); "
          f"{result['tokens_computed']} token computed, the same tokens: {result['same_tokens']}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR")
    top.add_argument("--lengths", type=length, nargs="+", default=[513, 2049, 4097], metavar="N",
                     help="tokens of a prompt, each 16 k + 1 (default 513 2049 4097)")
    top.add_argument("--rounds", type=int, default=5, help="prompts of each length (default 5)")
    top.add_argument("--threads", type=int, default=1)
    top.add_argument("--json", action="store_true", help="one JSON line a length")
    top.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)       # for its own processes
    top.add_argument("--folder", help=argparse.SUPPRESS)
    return top


def length(text: str) -> int:
    found = int(text)
    if found < 17 or found % 16 != 1:
        raise argparse.ArgumentTypeError(f"{found} is not 16 k + 1, at least 17: of another prompt "
                                         "more than one token is computed again")
    return found


if __name__ == "__main__":
    sys.exit(main())
