"""The command line of a cluster: a prompt from a file, the answer on the standard output.

The same function runs in new processes of this machine, started by `launch`, and in those that
torchrun has started, on one machine or several. What rank 0 returns is printed as JSON.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from ..engine.engine import usage
from ..engine.request import Request
from ..model import checkpoint
from ..tokenizer import decode_bytes
from .launch import connected, launch


def main(answer: Callable, module: str, description: str, arguments: list[str] | None) -> int:
    """Have `answer(world, prompt bytes, checkpoint folder, max_tokens)` done by all ranks."""
    options = parser(module, description).parse_args(arguments)
    job = (options.prompt_file.read_bytes(), options.model, options.max_tokens)
    if "RANK" in os.environ:                # torchrun has started this process
        with connected() as world:
            result = answer(world, *job)
    else:
        result = launch(answer, options.workers, *job, deadline_s=options.deadline_s)[0]
    if result is not None:
        print(json.dumps(result))
    return 0


def parser(module: str, description: str) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    top.add_argument("--prompt-file", type=Path, required=True, metavar="F")
    top.add_argument("--max-tokens", type=int, default=64, metavar="N")
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR",
                     help="checkpoint folder (default: the shipped toy)")
    top.add_argument("--workers", type=int, default=2, metavar="N",
                     help="processes, where torchrun does not say how many (default 2)")
    top.add_argument("--deadline-s", type=float, default=300.0, metavar="S")
    return top


def printable(request: Request) -> dict:
    """A finished request as the command prints it."""
    return {"answer": decode_bytes(request.output).decode(errors="replace"),
            "reason": request.reason, "usage": str(usage(request))}
