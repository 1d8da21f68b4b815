"""The command line: `python -m minimodel generate | train | serve | store`.

torch is loaded by the command that needs it, so that `--help` answers at once.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")    # before torch: see `train`'s help

# The recipes of `model/train.py`, whose names are in capitals there, and their runs' folders.
RECIPES = {"shipped": "run-toy", "small": "run-small", "latent": "run-latent",
           "shared": "run-shared"}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m minimodel",
        description="A toy Mixture-of-Experts model and the machine that serves it.",
        epilog="Each command explains itself: python -m minimodel generate --help")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(commands)
    add_train(commands)
    add_serve(commands)
    add_store(commands)
    return top


def add_generate(commands) -> None:
    generate = commands.add_parser(
        "generate", help="continue a prompt",
        description="Continue the bytes of a file, greedily, and print the answer as it is "
                    "written. The start token is added. The toy answers questions about a town "
                    "notebook: lines such as 'The code of the red door is 4821.', then a line "
                    "'Q: What is the code of the red door?'")
    generate.add_argument("--prompt-file", required=True, metavar="F",
                          help="file with the prompt, taken byte by byte (the toy knows \\n as the "
                               "end of a line, not \\r\\n); - reads standard input")
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N",
                          help="write at most N tokens (one byte each; default 64)")
    generate.add_argument("--model", type=Path, metavar="DIR",
                          help="checkpoint folder, as `train` writes it (default: the shipped toy)")
    generate.add_argument("--without-cache", action="store_true",
                          help="read the whole text again for every token: same answer, slower")
    generate.add_argument("--store", type=Path, metavar="DIR",
                          help="keep the notes of what is read and written in this folder, and "
                               "compute only what is not there from an earlier time")
    generate.add_argument("--usage", action="store_true",
                          help="then print which tokens were hits, misses and output (to standard "
                               "error)")
    generate.set_defaults(run=run_generate)


def add_train(commands) -> None:
    train = commands.add_parser(
        "train", help="train the toy, or one of its relatives",
        description="Train from random weights, or go on where a stopped run left off. Ctrl-C "
                    "saves the run; the same command resumes it. Use two threads only on a "
                    "machine that is otherwise idle: OMP_WAIT_POLICY=PASSIVE, set here unless "
                    "you set it, keeps them from spinning.")
    which = train.add_mutually_exclusive_group()
    which.add_argument("--recipe", choices=RECIPES, default="shipped",
                       help="shipped: the toy, an hour (default); small: a few minutes; latent and "
                            "shared: the toy with another design of attention, an hour each")
    which.add_argument("--small", dest="recipe", action="store_const", const="small",
                       default="shipped", help="the same as --recipe small")
    train.add_argument("--out", type=Path, default=None, metavar="DIR",
                       help="folder for the run and its checkpoint (default: "
                            f"{', '.join(RECIPES.values())})")
    train.add_argument("--seed", type=int, default=0, help="seed of weights and texts (default 0)")
    train.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    train.add_argument("--float32", action="store_true",
                       help="multiply in float32, for processors without bfloat16 instructions")
    train.set_defaults(run=run_train)


def add_serve(commands) -> None:
    serve = commands.add_parser(
        "serve", help="answer over HTTP, as OpenAI's API does",
        description="Serve a model at /v1/completions and /v1/chat/completions, for OpenAI's "
                    "client and any like it, until Ctrl-C. The usage of each answer counts hits "
                    "and misses as DeepSeek's API does. /health and /metrics need no key.")
    serve.add_argument("--model", type=Path, metavar="DIR",
                       help="checkpoint folder, as `train` writes it (default: the shipped toy)")
    serve.add_argument("--name", metavar="NAME",
                       help="what clients call the model (default: the folder's name)")
    serve.add_argument("--store", type=Path, metavar="DIR",
                       help="keep the notes in this folder, so that a restart forgets nothing")
    serve.add_argument("--replicas", type=int, default=1, metavar="N",
                       help="engines that share the weights, behind a router (default 1)")
    serve.add_argument("--blocks", type=int, default=2_048, metavar="N",
                       help="room of each replica's cache, in blocks of 16 tokens (default 2048)")
    serve.add_argument("--host", default="127.0.0.1", metavar="H",
                       help="address to listen on (default 127.0.0.1: this machine only)")
    serve.add_argument("--port", type=int, default=8000, metavar="P",
                       help="port to listen on; 0 takes one that is free (default 8000)")
    serve.add_argument("--api-key-file", type=Path, metavar="F",
                       help="let in only who has a key: a line 'KEY TENANT' for each, and for "
                            "agents 'KEY TENANT agent'. Tenants share nothing")
    serve.add_argument("--max-waiting", type=int, default=64, metavar="N",
                       help="refuse a request (429) while N wait for their first token "
                            "(default 64)")
    serve.add_argument("--max-body-bytes", type=int, default=1 << 20, metavar="N",
                       help="refuse a longer request (413; default 1 MiB)")
    serve.set_defaults(run=run_serve)


def add_store(commands) -> None:
    store = commands.add_parser(
        "store", help="look at a folder of notes, and tidy it",
        description="ls: the records, the one used longest ago first; stats: how many, of how many "
                    "models; check: read them all and say if any is damaged; expire: remove those "
                    "that nobody used for as long as they were to be kept; clear: remove all. An "
                    "engine that uses the folder at the same time may go on.")
    store.add_argument("action", choices=STORE_ACTIONS)
    store.add_argument("folder", type=Path, metavar="DIR", help="the folder, as --store names it")
    store.set_defaults(run=run_store)


def run_generate(options: argparse.Namespace) -> None:
    if options.without_cache and (options.store or options.usage):
        raise ValueError("--without-cache keeps no notes, and --store and --usage are about notes: "
                         "leave out either")
    prompt = read_prompt(options.prompt_file)
    import torch

    from .engine.engine import usage
    from .model import checkpoint
    from .tokenizer import VOCAB_SIZE, decode_bytes, encode

    torch.set_num_threads(1)
    model = checkpoint.load(options.model or checkpoint.TOY)
    if model.config.vocab_size != VOCAB_SIZE:
        raise ValueError(f"the model in {options.model} has a vocabulary of "
                         f"{model.config.vocab_size}, not the {VOCAB_SIZE} bytes and marks that "
                         "this command writes: give a model that was trained on them")
    tokens, request = answer(model, encode(prompt), options)
    for token in tokens:
        sys.stdout.buffer.write(decode_bytes([token]))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    if options.usage:
        print(usage(request), file=sys.stderr)


def answer(model, prompt: list[int], options: argparse.Namespace):
    """The tokens as they are written, and the engine's request, if it is an engine that writes."""
    from .cache.paged import PagedCache
    from .cache.store import DiskStore
    from .engine.engine import Engine, fingerprint_of
    from .engine.generate import stream_with_cache, stream_without_cache
    from .engine.request import Sampling, State

    if not options.store and not options.usage:
        write = stream_without_cache if options.without_cache else stream_with_cache
        return write(model, prompt, options.max_tokens), None
    store = DiskStore(options.store, fingerprint_of(model)) if options.store else None
    num_blocks = (len(prompt) + options.max_tokens) // 16 + 1
    engine = Engine(model, PagedCache(model.config, num_blocks), store=store)
    request = engine.submit(prompt, Sampling(max_tokens=options.max_tokens))
    if request.state is State.FINISHED:
        raise ValueError(request.reason)
    return engine.listen(request), request


def read_prompt(name: str) -> bytes:
    try:
        prompt = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {name}: {error.strerror}. "
                         "Give a file, or - for standard input") from error
    if not prompt:
        raise ValueError(f"the prompt file {name} is empty: write at least one byte into it")
    return prompt


def run_train(options: argparse.Namespace) -> None:
    if options.threads < 1:
        raise ValueError(f"--threads {options.threads} must be at least 1")
    folder = options.out or Path(RECIPES[options.recipe])
    from dataclasses import replace

    import torch
    from tqdm import tqdm

    from .model import checkpoint, train

    torch.set_num_threads(options.threads)
    recipe = replace(getattr(train, options.recipe.upper()),
                     seed=options.seed, bfloat16=not options.float32)
    with tqdm(total=recipe.num_steps, unit="step", disable=None) as bar:
        def progress(line: dict) -> None:
            bar.n = line["step"]
            bar.refresh()
            recall = "-" if line["recall"] is None else f"{line['recall']:.0%}"
            tqdm.write(f"step {line['step']:5} of {recipe.num_steps}  rows of {line['length']:4}  "
                       f"loss {line['loss']:.3f}  recall {recall:>4}")

        with train.StopOnSignal() as should_stop:
            model = train.train(recipe, folder, progress=progress, should_stop=should_stop)
    if model is None:
        print(f"Stopped and saved in {folder}. The same command goes on from there.")
        return
    checkpoint.save(model, folder / "checkpoint")
    print("Done. Try: python -m minimodel generate "
          f"--model {folder / 'checkpoint'} --prompt-file F")


def run_serve(options: argparse.Namespace) -> None:
    for name in ("replicas", "blocks", "max_waiting", "max_body_bytes"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at "
                             "least 1")
    try:
        from .serve import server, tenants
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs {error.name}, which is not installed: pip install "
                         "fastapi uvicorn") from error
    import torch

    from .model import checkpoint

    torch.set_num_threads(1)
    keys = tenants.read_tenants(options.api_key_file) if options.api_key_file else None
    listening = server.bind(options.host, options.port)         # before what takes its time
    folder = options.model or checkpoint.TOY
    service = server.make_service(
        checkpoint.load(folder), num_replicas=options.replicas, num_blocks=options.blocks,
        store=options.store, max_waiting=options.max_waiting)
    site = server.Site(service, options.name or folder.resolve().name,
                       keys or tenants.Tenants(), options.max_body_bytes)
    print(f"{site.model} at {server.url_of(listening)}/v1 (Ctrl-C ends it)", flush=True)
    if keys is None and not server.is_loopback(listening):
        print("warning: whoever reaches this address may use it: give --api-key-file",
              file=sys.stderr, flush=True)
    server.serve(site, listening)


# --- the store ---------------------------------------------------------------------------


def run_store(options: argparse.Namespace) -> None:
    from .cache.store import DiskStore

    if not options.folder.is_dir():
        raise ValueError(f"there is no folder {options.folder}: give the one that --store names")
    store = DiskStore(options.folder, capacity_bytes=1 << 62, min_free_bytes=0)
    STORE_ACTIONS[options.action](store)


def list_records(store) -> None:
    for key, entry in store.index.entries.items():
        unused_h = max(0.0, time.time() - entry.last_used_s) / 3600
        print(f"{key.hex()[:12]} after {entry.parent.hex()[:12]}  "
              f"model {store.header(key).fingerprint.hex()[:12]}  {entry.num_bytes:,} bytes  "
              f"unused for {unused_h:.1f} of {entry.ttl_s / 3600:.0f} h")


def count_records(store) -> None:
    models = Counter(store.header(key).fingerprint.hex() for key in store.index.entries)
    print(f"{len(store.index)} records, {store.index.num_bytes:,} bytes, models: {len(models)}")
    for model, count in models.most_common():
        print(f"model {model[:12]}: {count} records")


def check_records(store) -> None:
    try:
        print(f"{store.check()} records, all whole")
    except AssertionError as error:
        raise ValueError(f"{error}. An engine that asks for it removes it and computes") from None


STORE_ACTIONS = {
    "ls": list_records, "stats": count_records, "check": check_records,
    "expire": lambda store: print(f"{store.counts['expired']} records removed"),    # by opening it
    "clear": lambda store: print(f"{store.clear()} records removed")}


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except BrokenPipeError:         # the reader left: no word about it, not at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
