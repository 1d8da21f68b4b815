"""What spreading the experts over ranks does, and what a dead rank costs.

    python benchmarks/experts.py [--model DIR] [--requests 16] [--tokens 64] [--spare 1]
                                 [--calls 6] [--notebook-bytes 1000] [--patience-s 2]
                                 [--quick] [--json]

The same requests are served on 1, 2 and 4 ranks, processes of one thread each that take every
step together. Counted in the decode steps: expert weights that a rank reads, beside what E5
expects of even choices, and what travels, beside E6. Timed: how much of a step is communication
(waiting for slower ranks included), and tokens per second. The numbers of ranks take turns, and
ratios are medians over the turns. More ranks than cores give no speed-up: these ratios say what
meeting costs on one machine, and nothing about many.

Then E8, the fullest rank's rows over the mean (mean of the layers): with experts in order, and
placed by what *other* text of the same kind has chosen, with `--spare` further copies a rank. Over
the whole run, which is what a placement can even out, and in a decode step, where chance has its
say (beside it, modelled, a step whose tokens choose at random).

At last three ranks lose one in the middle of their answers: killed, without a store and with one,
and hung. Each answer of this benchmark must be that of one undivided engine; the exit code is 1
otherwise. A minute or two. With --quick less, on 1 and 2 ranks, and nobody hangs.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist

from minimodel.cache.paged import PagedCache
from minimodel.cluster.balance import Placement, in_order, place_experts
from minimodel.cluster.experts import ShardedExperts, anyone, shard, step_together
from minimodel.cluster.group import Call, Change, Supervisor
from minimodel.cluster.launch import World, launch
from minimodel.cluster.member import toy
from minimodel.config import ModelConfig
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model import checkpoint
from minimodel.model.corpus import DOMAINS, town_notebook
from minimodel.simulate import cost
from minimodel.tokenizer import encode

TEXTS = {"arithmetic": ("sums",), "mixed": tuple(DOMAINS)}      # and their kinds of documents
WAYS = ("seen", "in_order", "placed")       # what placements are made by; then, how experts lie
LOSSES = (("killed", False), ("killed", True), ("hung", True))  # how, and whether with a store
QUICK = {"ranks": (1, 2), "losses": LOSSES[:2], "requests": 6, "tokens": 24, "calls": 3,
         "notebook_bytes": 300}
COUNTED = ("rows_run", "expert_bytes", "bytes_sent", "communicating_s", "chosen")
PROMPT = 129                    # tokens
BLOCKS = 1_024
HEARD = 5                       # tokens of each of a rank's answers, before it is lost

# What is printed without --json: tables in Markdown, by their columns' titles and cells.
READ = {"ranks": "{ranks}", "bytes of experts, a rank and step": "{expert_bytes:,}",
        "modelled (E5)": "*{expert_bytes_modelled:,}*", "by layer": "{expert_bytes_layers}",
        "bytes sent, a token": "{sent_bytes:,}", "modelled (E6)": "*{sent_bytes_modelled:,}*"}
TIMED = {"ranks": "{ranks}", "of a step, communication": "{communicating_share:.0%}",
         "tokens per second": "{tokens_per_s:,}", "to one rank": "{ratio}",
         "to an undivided engine": "{ratio_to_undivided}", "same tokens": "{same_tokens}"}
BALANCE = {"text, ranks": "{text}, {ranks}", "the whole run, in order": "{in_order:.2f}",
           "placed": "**{placed:.2f}**", "a decode step, in order": "{in_order_step:.2f}",
           "a decode step, placed": "{placed_step:.2f}",
           "if chosen at random, modelled": "*{random_step:.2f}*"}
LOSS = {"a rank is": "{case}", "store": "{store}", "noticed": "{noticed_s:.2f} s",
        "decided": "{decided_s:.2f} s", "rebuilt": "{rebuilt_s:.2f} s",
        "others go on": "{others_s:.2f} s", "its calls": "{moved}",
        "they go on": "{moved_s:.2f} s", "tokens computed again": "{computed_again:,}",
        "calls lost": "{lost}", "same tokens": "{same_tokens}"}


def main(arguments: list[str] | None = None) -> int:
    options = read(arguments)
    torch.set_num_threads(1)
    found = launch(f"{__file__}:serve_in_turn", options.ranks[-1], options, deadline_s=400)
    rows = [*report(spreads(found, options), options, READ, TIMED),
            *report(balances(found, options), options, BALANCE),
            *report(losses(options), options, LOSS)]
    return 0 if all(row["same_tokens"] for row in rows) else 1


# --- the load -------------------------------------------------------------------------------------


def prompts_of(text: str, way: str, options: Namespace) -> list[list[int]]:
    """Openings of documents, of one kind after another. All processes know the same."""
    rng, kinds = random.Random(f"experts/{text}/{way == 'seen'}"), TEXTS[text]
    return [DOMAINS[kinds[i % len(kinds)]](rng, PROMPT + 100).ids[:PROMPT]
            for i in range(options.requests)]


def notebooks(options: Namespace) -> list[list[int]]:
    """Questions to as many towns: nobody remembers the beginning of another's notebook."""
    books = [town_notebook(random.Random(f"experts/{i}"), options.notebook_bytes)
             for i in range(options.calls)]
    return [encode(book.ask(book.facts[0])) for book in books]


def sampling(options: Namespace) -> Sampling:
    return Sampling(max_tokens=options.tokens, stop_ids=frozenset())


def make_engine(options: Namespace) -> Engine:
    """Reads all prompts in its first step, and finds nothing from before."""
    model = checkpoint.load(options.model)
    limits = Limits(max_tokens_per_step=1 << 20, max_running=1 << 10, spare_blocks=0)
    return Engine(model, PagedCache(model.config, BLOCKS), limits, reuse=False)


# --- in the processes -----------------------------------------------------------------------------


def serve_in_turn(world: World, options: Namespace) -> dict[tuple[str, str, int], dict]:
    """This rank's part of each text and way on each number of ranks (0: on an undivided engine)."""
    groups = {ranks: dist.new_group(range(ranks)) for ranks in options.ranks}
    whole, divided, found = make_engine(options), make_engine(options), {}
    fetch = checkpoint.ExpertFile(options.model)
    for text, way in product(TEXTS, WAYS):
        prompts = prompts_of(text, way, options)
        if world.rank == 0:
            found[text, way, 0] = serve(whole, [], prompts, groups[1], options)
        for ranks, group in groups.items():
            dist.barrier()
            if world.rank < ranks:
                seen = found[text, "seen", ranks] if way == "placed" else None
                runs = shard(divided.model, placements(seen, group, options), group, fetch)
                found[text, way, ranks] = serve(divided, runs, prompts, group, options)
    return found


def placements(seen: dict | None, group: dist.ProcessGroup, options: Namespace) -> list[Placement]:
    """For each expert layer: by what the group's tokens were seen to choose; in order if unseen."""
    config, ranks = checkpoint.read_config(options.model), dist.get_world_size(group)
    if seen is None:
        return [in_order(config.num_experts, ranks)] * expert_layers(config)
    loads = seen["chosen"].sum(0)                       # [layers, experts]
    dist.all_reduce(loads, group=group)
    return [place_experts(load, ranks, ranks * options.spare) for load in loads.tolist()]


def serve(engine: Engine, runs: list[ShardedExperts], prompts: list[list[int]],
          group: dist.ProcessGroup, options: Namespace) -> dict:
    """This rank's answers, each step's seconds, and all COUNTED things: [steps, layers]."""
    requests = [engine.submit(prompt, sampling(options))
                for prompt in prompts[dist.get_rank(group)::dist.get_world_size(group)]]
    seconds, traffic = [], []
    while anyone(not engine.scheduler.is_idle, group=group)[0]:
        started_s = time.perf_counter()
        step_together(engine)
        seconds.append(time.perf_counter() - started_s)
        traffic.append([run.take_traffic() for run in runs])
    return {"answers": [request.output for request in requests], "seconds": torch.tensor(seconds),
            **{name: torch.tensor([[getattr(layer, name) for layer in step] for step in traffic])
               for name in COUNTED}}


# --- what came of it ------------------------------------------------------------------------------


def spreads(found: list[dict], options: Namespace) -> Iterator[dict]:
    """For each number of ranks: what decode steps read and send (mixed text, experts in order),
    and how long they take (all turns)."""
    seconds = {ranks: step_seconds(found, ranks) for ranks in (0, *options.ranks)}
    for ranks in options.ranks:
        yield {"case": "spread", "ranks": ranks, "requests": options.requests,
               **counted(found, ranks, options), **modelled(ranks, options),
               "communicating_share": communicating_share(found, ranks),
               "tokens_per_s": round(options.requests / seconds[ranks].median().item()),
               "ratio": round((seconds[1] / seconds[ranks]).median().item(), 2),
               "ratio_to_undivided": round((seconds[0] / seconds[ranks]).median().item(), 2),
               "same_tokens": all(same(found, text, way, ranks)
                                  for text, way in product(TEXTS, WAYS))}


def of_all(found: list[dict], name: str, text: str, way: str, ranks: int) -> torch.Tensor:
    """What was counted: [ranks, steps, layers]. The first step reads the prompts."""
    return torch.stack([part[text, way, ranks][name] for part in found[:max(ranks, 1)]]).double()


def step_seconds(found: list[dict], ranks: int) -> torch.Tensor:
    """Of each turn, its median decode step. A step lasts until its last rank is done."""
    return torch.stack([of_all(found, "seconds", text, way, ranks)[:, 1:].amax(0).median()
                        for text, way in product(TEXTS, WAYS)])


def communicating_share(found: list[dict], ranks: int) -> float:
    """Of the time of decode steps: the median over ranks and turns."""
    shares = []
    for turn in product(TEXTS, WAYS):
        communicating = of_all(found, "communicating_s", *turn, ranks)[:, 1:].sum((1, 2))
        shares += (communicating / of_all(found, "seconds", *turn, ranks)[:, 1:].sum(1)).tolist()
    return round(statistics.median(shares), 3)


def counted(found: list[dict], ranks: int, options: Namespace) -> dict:
    """Of a decode step: the expert weights that a rank reads, and what all send to others."""
    weights = of_all(found, "expert_bytes", "mixed", "in_order", ranks)[:, 1:].mean((0, 1))
    sent = of_all(found, "bytes_sent", "mixed", "in_order", ranks)[:, 1:].sum((0, 2)).mean()
    return {"expert_bytes": round(weights.sum().item()),
            "expert_bytes_layers": [round(layer) for layer in weights.tolist()],
            "sent_bytes": round(sent.item() / options.requests)}


def modelled(ranks: int, options: Namespace) -> dict:
    """E5 and E6: every token chooses evenly and alone, and one in `ranks` of its rows stays."""
    config = checkpoint.read_config(options.model)
    layers, top_k = expert_layers(config), config.experts_per_token
    expert_bytes = 3 * config.hidden_size * config.expert_size * 4
    distinct = cost.expected_distinct_experts(config.num_experts, top_k, options.requests)
    rows = cost.all_to_all_bytes(1, top_k, config.hidden_size, 4 + 4)
    return {"expert_bytes_modelled": round(
                cost.expert_bytes_per_step(layers, distinct, ranks, expert_bytes)),
            "sent_bytes_modelled": round(layers * rows * (ranks - 1) / ranks)}


def expert_layers(config: ModelConfig) -> int:
    return config.num_layers - config.num_dense_layers


def same(found: list[dict], text: str, way: str, ranks: int) -> bool:
    """Whether the answers are those of the undivided engine. Prompts were dealt in turn."""
    expected = found[0][text, way, 0]["answers"]
    return all(part[text, way, ranks]["answers"] == expected[rank::ranks]
               for rank, part in enumerate(found[:ranks]))


def balances(found: list[dict], options: Namespace) -> Iterator[dict]:
    """E8 for each text and number of ranks."""
    for text, ranks in product(TEXTS, options.ranks[1:]):
        row = {"case": "balance", "text": text, "ranks": ranks,
               "random_step": at_random(ranks, options)}
        for way in WAYS[1:]:
            rows = of_all(found, "rows_run", text, way, ranks)
            row |= {way: imbalance(rows.sum(1)), f"{way}_step": imbalance(rows[:, 1:])}
        yield {**row, "same_tokens": same(found, text, "placed", ranks)}


def at_random(ranks: int, options: Namespace) -> float:
    """E8 of a decode step whose tokens choose any experts: the mean of many such steps."""
    config, rng = checkpoint.read_config(options.model), torch.Generator().manual_seed(8)
    scores = torch.rand(4_000, options.requests, config.num_experts, generator=rng)
    chosen = scores.topk(config.experts_per_token).indices.flatten(1)       # [steps, rows]
    homes = torch.nn.functional.one_hot(chosen * ranks // config.num_experts, ranks)
    return imbalance(homes.sum(1).T.double())


def imbalance(rows: torch.Tensor) -> float:
    """E8 of rows [ranks, ...]: the fullest rank's over the mean, averaged over all the rest."""
    return round((rows.amax(0) / rows.mean(0)).mean().item(), 3)


# --- a rank is lost -------------------------------------------------------------------------------


def losses(options: Namespace) -> Iterator[dict]:
    """What became of some calls, a rank of whose three was lost, in a new group each time."""
    prompts = notebooks(options)
    expected = make_engine(options).generate(prompts, sampling(options))
    for how, keeps in options.losses:
        with tempfile.TemporaryDirectory() as folder:
            calls, change, lost_s = lose_a_rank(how, folder if keeps else None, prompts, options)
        moved = [call for call in calls if call.moved]
        others = [call for call in calls if not call.moved]
        moments = {"noticed_s": change.noticed_s, "decided_s": change.decided_s,
                   "rebuilt_s": change.rebuilt_s, "others_s": go_on(others, change),
                   "moved_s": go_on(moved, change)}
        yield {"case": how, "store": keeps, "calls": len(calls), "moved": len(moved),
               **{name: round(moment - lost_s, 3) for name, moment in moments.items()},
               "computed_again": sum(call.computed_again for call in calls),
               "lost": sum(len(call.output) < options.tokens for call in calls),
               "same_tokens": [call.output for call in calls] == expected}


def lose_a_rank(how: str, store: str | None, prompts: list[list[int]],
                options: Namespace) -> tuple[list[Call], Change, float]:
    """The calls, all answered; the change of the group; and when a rank was lost."""
    with Supervisor(3, toy, store, str(options.model), BLOCKS,
                    patience_s=options.patience_s) as group:
        calls = [group.submit(prompt, sampling(options)) for prompt in prompts]
        victim = calls[0].member
        while any(len(call.output) < HEARD for call in calls if call.member == victim):
            group.poll()
        lost_s = group.clock()
        {"killed": group.workers.kill, "hung": group.workers.hang}[how](victim)
        group.run()
        return calls, group.changes[1], lost_s


def go_on(calls: list[Call], change: Change) -> float:
    """When the last of some calls had its next token."""
    later = [[time for time in call.token_times_s if time > change.decided_s] for call in calls]
    return max(times[0] for times in later if times)


# --- options and printing -------------------------------------------------------------------------


def report(rows: Iterable[dict], options: Namespace, *tables: dict[str, str]) -> list[dict]:
    """Print each row as a line of JSON, or in tables."""
    rows = list(rows)
    if options.json:
        for row in rows:
            print(json.dumps({"benchmark": "experts", "model": options.model.name, **row}))
        return rows
    for table in tables:
        print(f"| {' | '.join(table)} |\n|{'---|' * len(table)}")
        for row in rows:
            shown = {name: as_text(value) for name, value in row.items()}
            print(f"| {' | '.join(table.values()).format(**shown)} |")
        print(flush=True)
    return rows


def as_text(value):
    """Lists and booleans as people write them; of the rest the table's format takes care."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " / ".join(f"{one:,}" for one in value) if isinstance(value, list) else value


def read(arguments: list[str] | None) -> Namespace:
    """The command line; who asks for what cannot be run is told so before anything starts."""
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--model", type=Path, default=checkpoint.TOY, metavar="DIR")
    top.add_argument("--requests", type=at_least(4), default=16, help="in all (default 16)")
    top.add_argument("--tokens", type=at_least(2 * HEARD), default=64,
                     help="of each answer (default 64)")
    top.add_argument("--spare", type=at_least(0), default=1,
                     help="further copies of experts a rank, when placed (default 1)")
    top.add_argument("--calls", type=at_least(3), default=6,
                     help="that are served while a rank is lost (default 6)")
    top.add_argument("--notebook-bytes", type=at_least(60), default=1_000,
                     help="of each one's prompt (default 1000)")
    top.add_argument("--patience-s", type=float, default=2.0,
                     help="until a rank that hangs is missed (default 2)")
    top.add_argument("--quick", action="store_true", help="a short run: sizes of its own")
    top.add_argument("--json", action="store_true", help="one JSON line a case")
    options = top.parse_args(arguments, Namespace(ranks=(1, 2, 4), losses=LOSSES))
    if options.quick:
        vars(options).update(QUICK)
    try:
        config = checkpoint.read_config(options.model)
        for ranks in options.ranks:
            in_order(config.num_experts, ranks)
    except ValueError as error:
        top.error(str(error))
    if not expert_layers(config):
        top.error(f"the model in {options.model} has no expert layers: give one that has")
    return options


def at_least(least: int):
    """A number on the command line, not below this."""
    def number(text: str) -> int:
        if (found := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{found} must be at least {least}")
        return found
    return number


if __name__ == "__main__":
    sys.exit(main())
