"""Same output: every way to generate gives the tokens and logits of the slowest one.

The oracle reads the whole text again for every token, every row through every layer, and keeps
nothing. `WAYS` is the table of
everything that claims to compute the same: to add a way, write one function from a model and
prompts to answers, and one line in the table.
"""

import importlib.util
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from listening import listening

from minimodel.cache import keys
from minimodel.cache.dense import DenseCache
from minimodel.cache.paged import PagedCache
from minimodel.cache.store import DiskStore
from minimodel.cluster.group import Supervisor
from minimodel.cluster.handoff import DecodeWorker, PrefillWorker
from minimodel.cluster.launch import Workers
from minimodel.cluster.links import Network
from minimodel.cluster.mailbox import Mailbox
from minimodel.cluster.router import Ask, ByOpening, Cost, Policy, Router, round_robin
from minimodel.engine.engine import Engine, fingerprint_of
from minimodel.engine.generate import generate_with_cache, generate_without_cache
from minimodel.engine.request import Request, Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model import checkpoint
from minimodel.model.batch import Batch
from minimodel.model.corpus import town_notebook
from minimodel.model.transformer import Transformer
from minimodel.tokenizer import START, encode

Prompt = list[int]


@dataclass
class Answer:
    tokens: list[int]
    logits: torch.Tensor        # [tokens, vocabulary], those each token was chosen from


Way = Callable[[Transformer, list[Prompt], int], list[Answer]]


def oracle(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    return [without_cache(model, prompt, count) for prompt in prompts]


def without_cache(model: Transformer, prompt: Prompt, count: int) -> Answer:
    text, seen = list(prompt), []
    for _ in range(count):
        seen.append(model.logits_everywhere(torch.tensor([text]))[0, -1])
        text.append(int(seen[-1].argmax()))
    return Answer(text[len(prompt):], torch.stack(seen))


def only_wanted_rows(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """No cache either, but rows whose logits nobody wants stop where the last notes are written."""
    answers = []
    for prompt in prompts:
        text, seen = list(prompt), []
        for _ in range(count):
            seen.append(model(torch.tensor(text), Batch(new=[len(text)]))[0])
            text.append(int(seen[-1].argmax()))
        answers.append(Answer(text[len(prompt):], torch.stack(seen)))
    return answers


def dense(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    return [dense_in_chunks(model, prompt, count, len(prompt)) for prompt in prompts]


def chunked(size: int) -> Way:
    return lambda model, prompts, count: [
        dense_in_chunks(model, prompt, count, size) for prompt in prompts]


def dense_in_chunks(model: Transformer, prompt: Prompt, count: int, size: int) -> Answer:
    cache = DenseCache(model.config, len(prompt) + count, dtype=model.norm.weight.dtype)
    for first in range(0, len(prompt), size):
        logits = advance(model, cache, [prompt[first:first + size]])
    return decode(model, cache, logits, count)[0]


def ragged(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one cache and one step, then one row each."""
    capacity = max(map(len, prompts)) + count
    cache = DenseCache(model.config, capacity, len(prompts), dtype=model.norm.weight.dtype)
    return decode(model, cache, advance(model, cache, prompts), count)


def staggered(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one cache, cut so that some are still read while others would be done."""
    capacity = max(map(len, prompts)) + count
    cache = DenseCache(model.config, capacity, len(prompts), dtype=model.norm.weight.dtype)
    cuts = [max(1, len(prompt) // (2 + i)) for i, prompt in enumerate(prompts)]
    advance(model, cache, [prompt[:cut] for prompt, cut in zip(prompts, cuts, strict=True)])
    logits = advance(model, cache,
                     [prompt[cut:] for prompt, cut in zip(prompts, cuts, strict=True)])
    return decode(model, cache, logits, count)


def one_by_one(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """All prompts in one cache; each step leaves out all but one sequence, and reads it whole."""
    capacity = max(map(len, prompts)) + count
    cache = DenseCache(model.config, capacity, len(prompts), dtype=model.norm.weight.dtype)
    logits = torch.cat([advance(model, cache, [prompt if i == turn else []
                                               for i, prompt in enumerate(prompts)])
                        for turn in reversed(range(len(prompts)))]).flip(0)
    return decode(model, cache, logits, count)


def unread_logits(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Chunks of 5 whose logits nobody wants, but for the prompt's last row."""
    answers = []
    for prompt in prompts:
        cache = DenseCache(model.config, len(prompt) + count, dtype=model.norm.weight.dtype)
        for first in range(0, len(prompt), 5):
            chunk = prompt[first:first + 5]
            batch = cache.batch([len(chunk)])
            if first + 5 < len(prompt):
                batch = replace(batch, wanted=())
            logits = model(torch.tensor(chunk), batch, cache)
            cache.commit(batch)
        answers += decode(model, cache, logits, count)
    return answers


def advance(model: Transformer, cache: DenseCache, new: list[Prompt]) -> torch.Tensor:
    """One step that adds `new` to the cache's sequences; last logits [sequences, vocabulary]."""
    batch = cache.batch([len(tokens) for tokens in new])
    logits = model(torch.tensor([token for tokens in new for token in tokens]), batch, cache)
    cache.commit(batch)
    return logits


def decode(model: Transformer, cache: DenseCache, logits: torch.Tensor, count: int) -> list[Answer]:
    seen = [logits]
    while len(seen) < count:
        seen.append(advance(model, cache, seen[-1].argmax(-1)[:, None].tolist()))
    by_sequence = torch.stack(seen, dim=1)                  # [sequences, tokens, vocabulary]
    return [Answer(logits.argmax(-1).tolist(), logits) for logits in by_sequence]


# --- the engine: several requests at a time, in blocks ----------------------------------------

BLOCK = 7


def make_engine(model: Transformer, num_blocks: int, block_size: int = BLOCK,
                store: DiskStore | None = None, **limits) -> Engine:
    cache = PagedCache(model.config, num_blocks, block_size, model.norm.weight.dtype)
    return Engine(model, cache, Limits(**{"spare_blocks": 0, **limits}), store=store)


def greedy(count: int) -> Sampling:
    return Sampling(max_tokens=count, stop_ids=())


def run(engine: Engine, after_step=lambda record: None) -> dict[str, list[torch.Tensor]]:
    """Until nobody is left: the logits from which each request's tokens were chosen."""
    with listening() as seen:
        while (record := engine.step()) is not None:
            engine.check()
            after_step(record)
    assert engine.stats()["held"] == 0
    return seen


def answered(requests: list[Request], seen: dict[str, list[torch.Tensor]]) -> list[Answer]:
    return [Answer(request.output, torch.stack(seen[request.id])) for request in requests]


def served(budget: int = 512) -> Way:
    """All at once, with room for all."""
    def way(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
        room = sum(len(prompt) + count for prompt in prompts)
        engine = make_engine(model, room // BLOCK + len(prompts), max_tokens_per_step=budget)
        requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
        answers = answered(requests, run(engine))
        assert engine.stats()["preempted"] == 0
        return answers
    return way


def too_few_blocks(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Room for all prompts and for no answer: whoever came last is sent away again and again."""
    engine = make_engine(model, sum(-(-len(prompt) // BLOCK) for prompt in prompts))
    requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
    answers = answered(requests, run(engine))
    assert engine.stats()["preempted"] >= 1
    return answers


def preempted_after(num_outputs: int) -> Way:
    """Each beside a stranger who came first, and needs its block when so many are written."""
    return lambda model, prompts, count: [
        preempted_once(model, prompt, count, num_outputs) for prompt in prompts]


def preempted_once(model: Transformer, prompt: Prompt, count: int, num_outputs: int) -> Answer:
    stranger, first = [99] * (2 * count), 2 * count
    if num_outputs:                     # blocks of one token: each step takes one for each of them
        engine = make_engine(model, first + len(prompt) + 2 * (num_outputs - 1), 1)
    else:                               # still in its prompt when the stranger writes
        engine = make_engine(model, first + len(prompt) + 1, 1, max_tokens_per_step=2)
    engine.submit(stranger, greedy(num_outputs + 1 if num_outputs else 3))
    request, then = engine.submit(prompt, greedy(count)), []
    seen = run(engine, lambda record: then.extend(
        len(request.output) for name in record.preempted if name == request.id))
    assert then == [num_outputs]
    return answered([request], seen)[0]


def among_strangers(model: Transformer, prompts: list[Prompt], count: int,
                    sampling: Sampling | None = None) -> list[Answer]:
    """Strangers of any length, drawn by chance, come before, between and after, in small steps."""
    rng, engine = Random("strangers"), make_engine(model, 150, max_tokens_per_step=24)

    def stranger(*_):
        if engine.num_submitted < 4 * len(prompts):
            engine.submit(rng.choices(range(256), k=rng.randint(1, 40)),
                          Sampling(rng.randint(1, 15), temperature=1.5, seed=rng.randint(0, 99)))
    requests = []
    for prompt in prompts:
        stranger()
        requests.append(engine.submit(prompt, sampling or greedy(count)))
    answers = answered(requests, run(engine, stranger))
    assert any({share.kind for share in record.shares} == {"prefill", "decode"}
               for record in engine.records), "no step was mixed"
    return answers


def while_others_abort(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """After each step somebody else leaves, in whatever state: waiting, reading or writing."""
    rng, engine = Random("leaving"), make_engine(model, 90, max_tokens_per_step=16)
    others, requests = [], []
    for prompt in prompts:
        others += [engine.submit(rng.choices(range(256), k=30), greedy(25)) for _ in range(2)]
        requests.append(engine.submit(prompt, greedy(count)))
    rng.shuffle(others)
    leaving = iter(others)
    left_with = []

    def leave(_):
        if (other := next(leaving, None)) is not None:
            left_with.append((other.computed > 0, bool(other.output)))
            engine.abort(other.id)
    answers = answered(requests, run(engine, leave))
    assert {other.reason for other in others} == {"aborted"}
    assert len(set(left_with)) >= 2, "all left in one state"
    return answers


def three_answers(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Three answers to each prompt share its blocks and copy what they write to: the last one."""
    engine = make_engine(model, 150)
    requests = [engine.submit(prompt, greedy(count), num_answers=3) for prompt in prompts]
    seen = run(engine)
    for request in requests:
        assert len({tuple(answer.output) for answer in request.answers}) == 1
    return [Answer(request.answers[2].output,
                   torch.stack([seen[request.id][0], *seen[request.answers[2].id]]))
            for request in requests]


# --- remembered: the same prompts once more ----------------------------------------------------

def most_found(prompt: Prompt) -> int:
    """Tokens of whole blocks, but never all of them."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def from_memory(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Whole blocks are found, in prompts that fill their last block and others."""
    engine = make_engine(model, 150)
    for prompt in prompts:
        engine.submit(prompt, greedy(1))
    engine.run()
    requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
    answers = answered(requests, run(engine))
    assert [request.num_found for request in requests] == [most_found(prompt) for prompt in prompts]
    assert engine.stats()["shared"] == 0
    return answers


def after_a_turn(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """A prompt's beginning was asked before, and answered: hits end inside it."""
    engine = make_engine(model, 150)
    for prompt in prompts:
        engine.submit(prompt[:len(prompt) // 2 + 1], greedy(4))
    engine.run()
    requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
    answers = answered(requests, run(engine))
    assert any(0 < request.num_found < most_found(request.prompt) for request in requests)
    return answers


def barely_enough_blocks(prompts: list[Prompt]) -> int:
    """For all prompts, which share what they begin with, and no answer."""
    full = {tuple(prompt[:end]) for prompt in prompts
            for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    return len(full) + sum(len(prompt) % BLOCK > 0 for prompt in prompts)


def from_memory_then_preempted(model: Transformer, prompts: list[Prompt],
                               count: int) -> list[Answer]:
    """Hits in a memory too small for all: blocks found are shared, lost, found and computed."""
    engine = make_engine(model, barely_enough_blocks(prompts))
    for prompt in prompts:
        engine.generate([prompt], greedy(1))
    requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
    answers = answered(requests, run(engine))
    assert engine.stats()["preempted"] >= 1
    assert any(request.num_found for request in requests)
    return answers


def from_disk(loads_per_step: int = 256, lost: int = 0) -> Way:
    """By a new engine with a new store in the old folder, where some records may be gone."""
    def way(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
        with tempfile.TemporaryDirectory() as folder:
            def reopened() -> Engine:
                store = DiskStore(folder, fingerprint_of(model, BLOCK), min_free_bytes=0)
                return make_engine(model, 150, store=store, max_loads_per_step=loads_per_step)
            reopened().generate(prompts, greedy(2))
            engine = reopened()
            engine.store.evict(lost * engine.store.index.num_bytes // 100)
            requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
            answers = answered(requests, run(engine))
            loaded = sum(request.num_loaded for request in requests)
            assert loaded == sum(request.num_found for request in requests) > 0
            assert (loaded < sum(map(most_found, prompts))) == bool(lost)
            engine.store.check()
            return answers
    return way


def from_disk_then_preempted(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Whoever is sent away comes back with its own blocks, from memory or from disk."""
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder, fingerprint_of(model, BLOCK), min_free_bytes=0)
        engine = make_engine(model, barely_enough_blocks(prompts), store=store,
                             max_loads_per_step=2)
        engine.generate(prompts[:3], greedy(2))
        engine.pool.forget()
        requests = [engine.submit(prompt, greedy(count)) for prompt in prompts]
        answers = answered(requests, run(engine))
        assert engine.stats()["preempted"] >= 1
        assert store.counts["loaded"] > 0
        return answers


# --- handed off: one engine reads, another writes ----------------------------------------------

def handed_off(by_layer: bool = False) -> Way:
    """Prompts read by one engine; their whole blocks fetched by another, which writes."""
    def way(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
        network = Network(time.perf_counter)
        prefill = PrefillWorker("p", make_engine(model, 150), network.link("p"))
        decode = DecodeWorker(make_engine(model, 150), network.link("d"), by_layer=by_layer)
        with listening() as first:
            tickets = [prefill.run(prompt, greedy(count)) for prompt in prompts]
        requests = [decode.accept(ticket, prompt, greedy(count))
                    for ticket, prompt in zip(tickets, prompts, strict=True)]
        with listening() as rest:
            while not decode.is_idle:
                prefill.step()
                decode.poll()
        prefill.step()
        assert prefill.engine.stats()["held"] == decode.engine.stats()["held"] == 0
        assert decode.counts["bytes"] > 0
        return [Answer(request.output,
                       torch.stack([*first[ticket.request_id], *rest[request.id]]))
                for ticket, request in zip(tickets, requests, strict=True)]
    return way


# --- routed: any replica may serve it ----------------------------------------------------------

def routed(policy: Policy) -> Way:
    """Each prompt is sent three times, wherever the router sends it; the last time counts."""
    def way(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
        replicas = {name: make_engine(model, 150) for name in "abc"}
        router, places = Router("abc", policy), []
        for _ in range(3):
            answers = []
            for prompt in prompts:
                chain = keys.chain(keys.root_key(replicas["a"].fingerprint), prompt, BLOCK)
                most = keys.most_hits(len(prompt), BLOCK)
                with router.serving(Ask(chain[:most], len(prompt), count, BLOCK)) as choice:
                    engine = replicas[choice.replica]
                    request = engine.submit(prompt, greedy(count))
                    answers += answered([request], run(engine))
                    places.append(choice.replica)
                    assert request.num_found >= choice.expected_hit
        assert len(set(places)) > 1 or len(prompts) < 3
        return answers
    return way


# --- in a group: experts spread over processes -------------------------------------------------

GROUP_WORKERS = Path(__file__).with_name("group_workers.py")
spec = importlib.util.spec_from_file_location("same_output_workers", GROUP_WORKERS)
group_workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(group_workers)
GROUPS: dict[int, Workers] = {}         # that serve one model after another, by number of ranks


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    yield
    while GROUPS:
        GROUPS.popitem()[1].__exit__()


def in_a_group(num_ranks: int) -> Way:
    """Each rank serves its share of the prompts, with its share of the experts."""
    def way(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
        if num_ranks not in GROUPS:
            GROUPS[num_ranks] = Workers(f"{GROUP_WORKERS}:serve_jobs", num_ranks).__enter__()
        group, found = GROUPS[num_ranks], {}
        with job(model, prompts, count) as path:
            for rank in range(num_ranks):
                mailbox_of(group, f"jobs/{rank}").put(str(path))
            for rank in range(num_ranks):
                found |= awaited(group, mailbox_of(group, f"answers/{rank}"))
        assert sorted(found) == [*range(len(prompts))]
        return [Answer(*found[number]) for number in range(len(prompts))]
    return way


@contextmanager
def job(*content) -> Iterator[Path]:
    """A model and what to do with it, in a file for other processes."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
        path = Path(folder) / "job"
        path.write_bytes(pickle.dumps(content))
        yield path


def mailbox_of(group: Workers, name: str) -> Mailbox:
    """The same one each time: it counts."""
    mailboxes = group.__dict__.setdefault("mailboxes", {})
    return mailboxes.setdefault(name, Mailbox(group.store, name))


def awaited(group: Workers, mailbox: Mailbox, deadline_s: float = 120):
    ends_at = time.monotonic() + deadline_s
    while not (messages := mailbox.take()):
        group.require_alive()
        assert time.monotonic() < ends_at, f"no answer in {mailbox.name}"
        time.sleep(0.002)
    return messages[0]


def group_rebuilt_twice(model: Transformer, prompts: list[Prompt], count: int) -> list[Answer]:
    """Three processes share the experts; in the middle of the answers one is killed, then one."""
    with job(model) as path, Supervisor(3, f"{GROUP_WORKERS}:make_member", str(path),
                                        str(path.parent), spare=1) as group:
        calls = [group.submit(prompt, greedy(count)) for prompt in prompts]
        for victim, written in ((1, 2), (0, 5)):
            while min(len(call.output) for call in calls) < written:
                group.poll()
            group.workers.kill(victim)
            group.poll()
        group.run(60)
        assert group.epoch.members == (2,)
        assert any(call.moved for call in calls)
        return [Answer(call.output, torch.stack([
            pickle.loads((path.parent / group_workers.logits_name(prompt, number)).read_bytes())
            for number in range(count)])) for call, prompt in zip(calls, prompts, strict=True)]


WAYS: dict[str, Way] = {
    "only the wanted rows": only_wanted_rows,
    "dense": dense,
    "dense, chunks of 1": chunked(1),
    "dense, chunks of 3": chunked(3),
    "dense, chunks of 7": chunked(7),
    "dense, ragged": ragged,
    "dense, ragged and staggered": staggered,
    "dense, one at a time": one_by_one,
    "dense, logits of the last row only": unread_logits,
    "engine": served(),
    "engine, budget 1": served(budget=1),
    "engine, budget 3": served(budget=3),
    "engine, budget of a block less one": served(budget=BLOCK - 1),
    "engine, budget of a block": served(budget=BLOCK),
    "engine, budget of a block and one": served(budget=BLOCK + 1),
    "engine, preempted before the first token": preempted_after(0),
    "engine, preempted after one token": preempted_after(1),
    "engine, preempted after five tokens": preempted_after(5),
    "engine, too few blocks for all": too_few_blocks,
    "engine, among strangers": among_strangers,
    "engine, while others abort": while_others_abort,
    "engine, three answers": three_answers,
    "engine, second send from memory": from_memory,
    "engine, second send after a shorter one": after_a_turn,
    "engine, second send from memory, then preempted": from_memory_then_preempted,
    "engine, second send from disk": from_disk(),
    "engine, second send from disk, a block a step": from_disk(loads_per_step=1),
    "engine, second send from what is left on disk": from_disk(lost=40),
    "engine, second send from disk, then preempted": from_disk_then_preempted,
    "handed off": handed_off(),
    "handed off layer by layer": handed_off(by_layer=True),
    "routed in turns": routed(round_robin),
    "routed by opening": routed(ByOpening(30)),
    "routed by cost": routed(Cost(read_s=0.01, affinity=0.5)),
    "in a group of 1": in_a_group(1),
    "in a group of 2": in_a_group(2),
    "in a group of 4": in_a_group(4),
    "in a group rebuilt twice, mid-answer": group_rebuilt_twice,
}

SHARED = {"kv_source_layers": (0, 0, 2, 2)}
LATENT = {"num_kv_heads": 6, "latent_size": 26, "nope_dim": 10, "rope_dim": 8}

# Lengths around the chunk sizes; two prompts of one length lie side by side, so that they share
# a part of the batch; two differ in their last token only.
PROMPTS = [[START, *Random(f"same/{i}").choices(range(256), k=size)]
           for i, size in enumerate([2, 13, 13, 20, 6])]
PROMPTS.append([*PROMPTS[3][:-1], 65])
COUNT = 9


@pytest.fixture(params=[{}, {"num_kv_heads": 6, "num_dense_layers": 0, "experts_per_token": 1},
                        {"num_kv_heads": 1, "num_heads": 5, "num_shared_experts": 0},
                        SHARED, LATENT, LATENT | SHARED], ids=str)
def model(request, make_model):
    with torch.inference_mode():
        yield make_model(**request.param)


@pytest.fixture(scope="module")
def known_answers():
    """The oracle's, of each model: it is slow, and asked once."""
    return {}


@pytest.fixture
def expected(model, known_answers):
    if model.config not in known_answers:
        known_answers[model.config] = oracle(model, PROMPTS, COUNT)
    return known_answers[model.config]


@pytest.mark.parametrize("way", WAYS, ids=WAYS)
def test_same_tokens_and_logits_as_the_oracle(model, expected, way):
    assert len({tuple(answer.tokens) for answer in expected}) == len(PROMPTS), "answers too alike"
    for ours, theirs in zip(WAYS[way](model, PROMPTS, COUNT), expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-10)


BY_CHANCE = Sampling(COUNT, temperature=1.2, top_p=0.95, seed=17, stop_ids=())


def test_g24_an_answer_does_not_depend_on_who_else_is_in_the_batch(model):
    """Steps of another shape add numbers in another order, and a near tie falls the other way.

    In float64 no draw comes near enough to a border: tokens are the same, in any company.
    """
    def served_by(engine, asked):
        requests = [engine.submit(prompt, sampling) for prompt, sampling in asked]
        run(engine)
        return [request.output for request in requests]

    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in (greedy(COUNT), BY_CHANCE)]
    engine = make_engine(model, 9)
    alone = [served_by(engine, [one])[0] for one in asked]
    assert len({tuple(answer) for answer in alone}) == len(asked)
    assert served_by(make_engine(model, 80), asked) == alone
    assert served_by(make_engine(model, 40, max_tokens_per_step=11), asked[::-1])[::-1] == alone
    assert served_by(make_engine(model, 12), asked) == alone
    strangers = among_strangers(model, PROMPTS, COUNT, BY_CHANCE)
    assert [answer.tokens for answer in strangers] == alone[1::2]


@pytest.mark.parametrize("generate", [generate_without_cache, generate_with_cache])
def test_the_package_writes_the_oracle_s_tokens(model, expected, generate):
    assert [generate(model, prompt, COUNT, stop_ids=()) for prompt in PROMPTS] == [
        answer.tokens for answer in expected]


# --- the shipped toys, in the number type that readers run them in ------------------------------

TOYS = {"keys and values": checkpoint.TOY, "latent": checkpoint.TOY_LATENT,
        "shared": checkpoint.TOY_SHARED}
MARGIN = 1e-2       # a greedy choice by less than this may tip with the order of additions


@pytest.fixture(scope="module", params=TOYS.values(), ids=TOYS)
def toy_and_answers(request):
    model = checkpoint.load(request.param)
    notebooks = [town_notebook(Random(f"same/toy/{i}"), 110 + 40 * i, 2) for i in range(2)]
    prompts = [encode(notebook.ask(notebook.facts[i])) for i, notebook in enumerate(notebooks)]
    with torch.inference_mode():
        yield model, prompts, oracle(model, prompts, 12)


@pytest.mark.parametrize("way", WAYS, ids=WAYS)
def test_the_toys_give_the_same_in_float32(toy_and_answers, way):
    model, prompts, expected = toy_and_answers
    for ours, theirs in zip(WAYS[way](model, prompts, 12), expected, strict=True):
        best = theirs.logits.topk(2).values
        clear = int((best[:, 0] - best[:, 1] > MARGIN).int().cumprod(0).sum())   # until a near tie
        assert clear >= 3, "near ties everywhere: choose other prompts"
        assert ours.tokens[:clear] == theirs.tokens[:clear]
        torch.testing.assert_close(ours.logits[:clear], theirs.logits[:clear], rtol=0, atol=1e-3)
