"""The handoff in one process, in virtual time: every message lost, late, doubled or damaged, either
side dead at any moment, and always the tokens of the slowest way. Blocks have five tokens.
"""

from dataclasses import replace

import pytest
import torch

from minimodel.cache.paged import PagedCache
from minimodel.cache.store import DiskStore
from minimodel.cluster.arrivals import Arrivals
from minimodel.cluster.handoff import (
    DecodeWorker,
    Front,
    HandoffError,
    PrefillWorker,
    require_one_model,
)
from minimodel.cluster.links import Network, corrupted, doubled, late, lost, only
from minimodel.cluster.messages import (
    Ack,
    Beat,
    Block,
    Bye,
    MessageError,
    Prefill,
    Read,
    Refused,
    pack,
    unpack,
)
from minimodel.engine.engine import Engine, fingerprint_of, usage
from minimodel.engine.generate import generate_without_cache
from minimodel.engine.request import Sampling, State
from minimodel.engine.scheduler import Limits

SIZE = 5
PROMPT = [200, *range(3, 29)]                       # 27 tokens: five blocks and two tokens
LEASE_S, PATIENCE_S, RETRY_S, STEP_S = 6.0, 3.0, 0.5, 0.1


def greedy(count=6):
    return Sampling(max_tokens=count, stop_ids=())


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(seed=11)


@pytest.fixture(scope="module")
def slow(model):
    """The slowest way's answers, each asked once."""
    known = {}

    def ask(prompt=PROMPT, most=6):
        if (*prompt, most) not in known:
            known[(*prompt, most)] = generate_without_cache(model, prompt, most, stop_ids=())
        return known[(*prompt, most)]
    return ask


class Pair:
    """A prefill and a decode worker, a network between them, and a clock that `turn` advances."""

    def __init__(self, model, num_blocks=(40, 40), limits=None, delay_s=0.05, store=None,
                 block_sizes=(SIZE, SIZE), **options):
        self.now = 0.0
        self.network = Network(lambda: self.now, delay_s=delay_s)
        engines = [
            Engine(model, PagedCache(model.config, count, size, model.norm.weight.dtype),
                   Limits(**limits) if limits else None, clock=lambda: self.now, store=kept)
            for count, size, kept in zip(num_blocks, block_sizes, (None, store), strict=True)]
        self.prefill = PrefillWorker("p", engines[0], self.network.link("p"),
                                     lease_s=LEASE_S, longest_s=4 * LEASE_S)
        self.decode = DecodeWorker(engines[1], self.network.link("d"), patience_s=PATIENCE_S,
                                   retry_s=RETRY_S, **options)

    def turn(self):
        """A tenth of a second: each side does what it can, if it lives."""
        self.now += STEP_S
        for name, live, side in (("p", self.prefill.step, self.prefill),
                                 ("d", self.poll, self.decode)):
            if name not in self.network.dead:
                live()
                side.check()

    def poll(self):
        self.decode.poll()

    def settle(self, most_s=60.0):
        """Turn until all is served and no block is held on either living side."""
        begun = self.now
        while not self.is_settled:
            self.turn()
            assert self.now - begun < most_s, "somebody waits for ever"

    @property
    def is_settled(self):
        idle = {"p": not self.prefill.leases and not self.prefill.reading, "d": self.decode.is_idle}
        return all(idle[name] for name in idle.keys() - self.network.dead)

    def sent(self, kind):
        """Messages of a kind that were sent so far."""
        messages = [unpack(sent.data) for sent in self.network.log]
        return [message for message in messages if isinstance(message, kind)]

    def held(self):
        return [side.engine.pool.stats()["held"] for side in (self.prefill, self.decode)]


class Served(Pair):
    """The same with a front on the decode side, which asks for what it needs by message."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.front = Front(self.decode, ["p"], patience_s=4.0)

    def poll(self):
        self.front.poll()

    @property
    def is_settled(self):
        return super().is_settled and ("d" in self.network.dead or self.front.is_idle)


def hand_off(pair, prompt=PROMPT, sampling=None, **how):
    """One prompt by both sides, to its end."""
    sampling = sampling or greedy()
    ticket = pair.prefill.run(prompt, sampling, **how)
    request = pair.decode.accept(ticket, prompt, sampling, **how)
    pair.settle()
    return request


# --- the same tokens ----------------------------------------------------------------------------

@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("size", [1, 4, 5, 6, 9, 10, 11, 14, 15, 16, 27])
def test_g53_g57_the_tokens_of_one_engine_at_block_borders_and_off_them(model, slow, size,
                                                                        by_layer):
    """Whole blocks are fetched, the rest of the prompt is computed, then the first token."""
    pair, prompt = Pair(model, by_layer=by_layer), PROMPT[:size]
    request = hand_off(pair, prompt)
    assert request.output == slow(prompt)
    computed = [share.num_tokens for record in pair.decode.engine.records
                for share in record.shares if share.kind != "load"]
    assert computed == [size % SIZE + 1] + [1] * 4
    assert len(pair.sent(Block)) == size // SIZE * (model.config.num_layers if by_layer else 1)
    assert pair.held() == [0, 0]
    assert pair.prefill.counts["acked"] == 1


@pytest.mark.parametrize("changes", [
    {"kv_source_layers": (0, 0, 2, 2)},
    {"num_kv_heads": 6, "latent_size": 26, "nope_dim": 10, "rope_dim": 8}],
    ids=["shared", "latent"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_g57_entries_of_any_width_are_handed_off(make_model, changes, by_layer):
    model = make_model(seed=7, **changes)
    request = hand_off(Pair(model, by_layer=by_layer))
    assert request.output == generate_without_cache(model, PROMPT, 6, stop_ids=())


def test_g57_sampled_by_chance_it_is_the_same_too(model):
    """A draw depends on the seed and the place, whoever makes it."""
    chance = Sampling(9, temperature=1.3, seed=5, stop_ids=())
    alone = Engine(model, PagedCache(model.config, 40, SIZE, torch.float64))
    assert hand_off(Pair(model), sampling=chance).output == alone.generate([PROMPT], chance)[0]


def test_many_prompts_at_once_in_small_engines(model, slow):
    """More than either side has room for: they queue on both, and some are preempted."""
    pair = Pair(model, num_blocks=(14, 16), limits={"max_tokens_per_step": 13, "spare_blocks": 0,
                                                    "max_loads_per_step": 2})
    prompts = [[50 + i, *PROMPT[:size]] for i, size in enumerate([20, 4, 13, 24, 9, 17, 26, 14])]
    waiting = {pair.prefill.submit(prompt, greedy(11)).id: prompt for prompt in prompts}
    answers = []
    while waiting or not pair.is_settled:
        pair.turn()
        for name in waiting.keys() & pair.prefill.leases.keys():
            prompt, lease = waiting.pop(name), pair.prefill.leases[name]
            answers.append(pair.decode.accept(pair.prefill.ticket(lease.request), prompt,
                                              greedy(11)))
        assert pair.now < 100
    assert [answer.output for answer in answers] == [
        slow(list(answer.prompt), 11) for answer in answers]
    assert len(answers) == len(prompts)
    assert pair.decode.engine.stats()["preempted"] >= 1
    assert pair.held() == [0, 0]


# --- the first token ----------------------------------------------------------------------------

@pytest.mark.parametrize("sampling", [greedy(1), "stop"], ids=["its only one", "a stop token"])
def test_an_answer_of_one_token_is_done_when_it_is_accepted(model, slow, sampling):
    if sampling == "stop":
        sampling = Sampling(max_tokens=9, stop_ids=frozenset(slow()[:1]))
    pair = Pair(model)
    request = pair.decode.accept(pair.prefill.run(PROMPT, sampling), PROMPT, sampling)
    assert (request.state, request.output) == (State.FINISHED, slow()[:1])
    assert request.reason == ("length" if sampling.max_tokens == 1 else "stop")
    pair.settle(1.0)
    assert pair.sent(Read) == []
    assert pair.held() == [0, 0]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_first_token_counts_once(model, slow, count):
    request = hand_off(Pair(model), sampling=greedy(count))
    assert request.output == slow(most=count)
    assert len(request.token_times_s) == count


def test_the_bill_is_that_of_one_engine(model, tmp_path):
    pair = Pair(model, store=DiskStore(tmp_path, fingerprint_of(model, SIZE), min_free_bytes=0))
    first, again = hand_off(pair), hand_off(pair)
    assert [str(usage(first)), str(usage(again))] == [str(usage(one)) for one in (
        sent_alone(model, 1), sent_alone(model, 2))]
    assert usage(again).hit_tokens == 25


def test_what_was_fetched_counts_as_no_hit_from_disk(model):
    """The prefill side had it in memory; the decode side got all of it over the link."""
    pair = Pair(model)
    pair.prefill.ack("d", Ack(pair.prefill.run(PROMPT, greedy()).request_id, 0))
    request = hand_off(pair)
    assert pair.decode.counts["parts"] == 5
    assert str(usage(request)) == str(usage(sent_alone(model, 2)))


def sent_alone(model, times):
    engine = Engine(model, PagedCache(model.config, 40, SIZE, torch.float64))
    for _ in range(times):
        request = engine.submit(PROMPT, greedy())
        engine.run()
    return request


# --- what is fetched ----------------------------------------------------------------------------

def test_g52_with_all_blocks_here_nothing_is_fetched_and_the_other_side_hears_at_once(model, slow):
    pair = Pair(model)
    hand_off(pair)
    before = len(pair.sent(Block))
    ticket = pair.prefill.run(PROMPT, greedy())
    request = pair.decode.accept(ticket, PROMPT, greedy())
    pair.turn()
    assert isinstance(pair.sent(Ack)[-1], Ack)
    pair.settle(2.0)
    assert request.output == slow()
    assert len(pair.sent(Block)) == before
    assert pair.prefill.counts["acked"] == 2


def test_only_the_blocks_that_are_not_here_are_fetched(model, slow):
    pair = Pair(model)
    hand_off(pair, PROMPT[:12])
    before = len(pair.sent(Block))
    request = hand_off(pair)
    assert request.output == slow()
    assert len(pair.sent(Block)) - before == 5 - 2


def test_twins_fetch_their_blocks_once(model, slow):
    pair = Pair(model)
    tickets = [pair.prefill.run(PROMPT, greedy()) for _ in range(2)]
    twins = [pair.decode.accept(ticket, PROMPT, greedy()) for ticket in tickets]
    pair.settle()
    assert [twin.output for twin in twins] == [slow()] * 2
    assert len(pair.sent(Block)) == 5
    assert pair.prefill.counts["acked"] == 2


def test_when_one_twin_leaves_the_other_gets_the_blocks_by_its_own_ticket(model, slow):
    pair = Pair(model)
    tickets = [pair.prefill.run(PROMPT, greedy()) for _ in range(2)]
    leaving, staying = (pair.decode.accept(ticket, PROMPT, greedy()) for ticket in tickets)
    while not pair.sent(Read):
        pair.turn()
    pair.decode.abort(leaving.id)
    pair.settle()
    assert staying.output == slow()
    assert {read.request_id for read in pair.sent(Read)} == {ticket.request_id
                                                             for ticket in tickets}
    assert pair.decode.counts["failed"] == 0
    assert pair.decode.counts["parts"] == 5


def test_a_local_request_may_read_what_a_ticket_promises(model, slow):
    """It came by no ticket, and waits for blocks that are on their way for another."""
    pair = Pair(model)
    first = pair.decode.accept(pair.prefill.run(PROMPT, greedy()), PROMPT, greedy())
    local = pair.decode.engine.submit(PROMPT, greedy())
    pair.settle()
    assert first.output == local.output == slow()


def test_a_window_bounds_what_is_underway(model, slow):
    pair = Pair(model, window=2)
    request = hand_off(pair)
    assert request.output == slow()
    assert [len(read.keys) for read in pair.sent(Read)] == [2, 2, 1]


def test_by_layer_the_first_layer_of_all_blocks_comes_first(model):
    pair = Pair(model, by_layer=True)
    hand_off(pair)
    assert [block.part for block in pair.sent(Block)] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    entries = {len(block.payload) for block in pair.sent(Block)}
    assert entries == {pair.decode.engine.cache.block_bytes // 4}


def test_others_are_served_while_blocks_are_underway(model, slow):
    """The pull takes two seconds; who decodes meanwhile writes a token in every turn."""
    pair = Pair(model, delay_s=1.0)
    pair.decode.retry_s = 2.5
    other = pair.decode.engine.submit([9, 8, 7], greedy(25))
    request = pair.decode.accept(pair.prefill.run(PROMPT, greedy()), PROMPT, greedy())
    pair.settle()
    gaps = [after - before for before, after in
            zip(other.token_times_s, other.token_times_s[1:], strict=False)]
    assert max(gaps) == pytest.approx(STEP_S)
    assert request.token_times_s[1] - request.token_times_s[0] > 2.0
    assert (other.output, request.output) == (slow([9, 8, 7], 25), slow())


# --- what must not be ---------------------------------------------------------------------------

@pytest.mark.parametrize("other", [{"block_sizes": (SIZE, 6)}, "weights", "dtype"], ids=str)
def test_g55_another_model_s_ticket_is_refused_before_any_byte(make_model, model, other):
    if isinstance(other, dict):
        pair = Pair(model, **other)
        fingerprints = [pair.prefill.engine.fingerprint, pair.decode.engine.fingerprint]
        ticket = pair.prefill.run(PROMPT)
    else:
        changed = make_model(seed=12) if other == "weights" else make_model(11, torch.float32)
        strangers, pair = Pair(changed), Pair(model)
        fingerprints = [strangers.prefill.engine.fingerprint, pair.decode.engine.fingerprint]
        ticket = strangers.prefill.run(PROMPT)
    with pytest.raises(HandoffError, match="start both with one checkpoint"):
        require_one_model(fingerprints)             # when they connect
    with pytest.raises(HandoffError, match="the notes are of fingerprint"):
        pair.decode.accept(ticket, PROMPT)          # and with every ticket
    assert pair.sent(Read) == []


def test_g55_a_read_of_another_model_is_refused_before_any_byte(model):
    pair = Pair(model)
    ticket = pair.prefill.run(PROMPT, greedy())
    pair.prefill.read("d", Read(ticket.request_id, 0, "77" * 32, ticket.keys, ticket.block_ids))
    assert "77777777" in pair.sent(Refused)[0].reason
    assert pair.sent(Block) == []


@pytest.mark.parametrize("change", [
    {"epoch": 1}, {"request_id": "77"}, {"part": 1}, {"part": -1}, {"parts": 7}, {"parts": 0},
    {"block_ids": (4, 3, 2, 1, 0)}], ids=str)
def test_a_read_that_does_not_fit_the_lease_is_refused(model, change):
    pair = Pair(model)
    ticket = pair.prefill.run(PROMPT, greedy())
    read = Read(ticket.request_id, 0, ticket.fingerprint, ticket.keys, ticket.block_ids)
    pair.prefill.read("d", replace(read, **change))
    assert len(pair.sent(Refused)) == 1
    assert pair.sent(Block) == []
    pair.prefill.read("d", read)
    assert len(pair.sent(Block)) == 5


@pytest.mark.parametrize("how", [{"salt": b"eve"}, {"prompt": PROMPT[:26]},
                                 {"prompt": [*PROMPT[:10], 99, *PROMPT[11:]]}], ids=str)
def test_a_ticket_is_for_one_prompt_and_one_tenant(model, how):
    pair = Pair(model)
    ticket = pair.prefill.run(PROMPT, greedy(), salt=b"ann")
    with pytest.raises(HandoffError, match="is for another prompt or salt"):
        pair.decode.accept(ticket, **{"prompt": PROMPT, "salt": b"ann", **how})
    pair.settle(1.0)                                # and its blocks are let go at once
    assert pair.prefill.counts["acked"] == 1


def test_tenants_keep_their_salts_on_both_sides(model, slow):
    pair = Pair(model)
    assert hand_off(pair, salt=b"ann").output == slow()
    other = pair.decode.engine.submit(PROMPT, greedy())
    pair.settle()
    assert other.num_found == 0


def test_bad_settings_are_named(model):
    pair = Pair(model)
    engine = pair.prefill.engine
    with pytest.raises(ValueError, match=r"lease_s=9\.0 must be above 0, and at most longest_s=2"):
        PrefillWorker("x", engine, pair.network.link("x"), lease_s=9.0, longest_s=2)
    with pytest.raises(ValueError, match="retry_s=8 must be above 0 and at most patience_s=5"):
        DecodeWorker(engine, pair.network.link("x"), retry_s=8)
    forgetful = Engine(model, PagedCache(model.config, 9, SIZE, torch.float64), reuse=False)
    with pytest.raises(HandoffError, match="no keys to name blocks by"):
        PrefillWorker("x", forgetful, pair.network.link("x"))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Front(pair.decode, ["p"]).submit([999])
    with pytest.raises(ValueError, match="retention='ever'"):
        Front(pair.decode, ["p"]).submit([9], retention="ever")


# --- leases -------------------------------------------------------------------------------------

def test_g49_a_ticket_that_waited_too_long_is_refused_and_the_prompt_computed(model, slow):
    """Between the grant and `accept` nobody beats: the lease ends, and others take the blocks."""
    pair = Pair(model, num_blocks=(7, 40))
    ticket = pair.prefill.run(PROMPT, greedy())
    while pair.now < ticket.expires_at + 1:
        pair.turn()
    assert pair.prefill.counts["expired"] == 1
    assert pair.held()[0] == 0
    pair.prefill.run([99] * 31)                     # overwrites them
    request = pair.decode.accept(ticket, PROMPT, greedy())
    pair.settle()
    assert request.output == slow()
    assert pair.decode.counts["failed"] == 1
    assert pair.sent(Block) == []


def test_g49_the_lease_has_ended_at_its_time_even_if_nobody_has_reaped_it(model):
    pair = Pair(model)
    ticket = pair.prefill.run(PROMPT, greedy())
    pair.now = ticket.expires_at
    pair.prefill.read("d", Read(ticket.request_id, 0, ticket.fingerprint, ticket.keys,
                                ticket.block_ids))
    assert "has ended" in pair.sent(Refused)[0].reason
    pair.prefill.beat("d", Beat(ticket.request_id, 0))      # too late for that, too
    pair.prefill.reap()
    assert pair.prefill.leases == {}


def test_g49_beats_keep_a_lease_alive_while_its_request_queues(model, slow):
    """The decode side is full for three leases; what was read is still there then."""
    pair = Pair(model, num_blocks=(40, 40), limits={"max_running": 1})
    pair.decode.engine.scheduler.limits = replace(pair.decode.engine.scheduler.limits, context=400)
    hog = pair.decode.engine.submit([7], Sampling(max_tokens=90, stop_ids=()))
    request = pair.decode.accept(pair.prefill.run(PROMPT, greedy()), PROMPT, greedy())
    pair.settle()
    assert hog.token_times_s[-1] > LEASE_S + 2
    assert request.output == slow()
    assert pair.decode.counts["failed"] == 0
    assert pair.prefill.counts["expired"] == 0
    assert len(pair.sent(Beat)) >= 5


def test_no_beat_prolongs_a_lease_for_ever(model):
    pair = Pair(model)
    ticket = pair.prefill.run(PROMPT, greedy())
    while pair.prefill.leases:
        pair.turn()
        pair.prefill.beat("d", Beat(ticket.request_id, ticket.epoch))
        assert pair.now < 5 * LEASE_S
    assert pair.now > 3.9 * LEASE_S


def test_a_prefill_worker_s_next_life_refuses_tickets_of_the_last(model, slow):
    pair = Pair(model)
    ticket = pair.prefill.run(PROMPT, greedy())
    pair.prefill = PrefillWorker("p", Pair(model).prefill.engine, pair.network.link("p"), epoch=1)
    pair.prefill.engine.clock = pair.prefill.clock = lambda: pair.now
    other = pair.prefill.run([8] * 27, greedy())            # has the same request id
    assert other.request_id == ticket.request_id
    request = pair.decode.accept(ticket, PROMPT, greedy())
    pair.settle(40)
    assert request.output == slow()
    assert "is of epoch 0, and this is epoch 1" in pair.sent(Refused)[0].reason


def test_a_full_prefill_worker_reads_on_when_blocks_were_fetched(model, slow):
    """Two prompts' blocks do not fit: the second is read when the first is acked."""
    pair = Pair(model, num_blocks=(7, 40))
    ticket = pair.prefill.run(PROMPT, greedy())
    second = pair.prefill.submit([77, *PROMPT[1:]], greedy())
    for _ in range(5):
        pair.turn()
    assert second.state is State.WAITING
    first = pair.decode.accept(ticket, PROMPT, greedy())
    while second.state is not State.HELD:
        pair.turn()
    assert pair.now < LEASE_S
    answer = pair.decode.accept(pair.prefill.ticket(second), second.prompt, greedy())
    pair.settle()
    assert (first.output, answer.output) == (slow(), slow([77, *PROMPT[1:]]))


# --- faults at every message --------------------------------------------------------------------

FAULTS = {"lost": lost, "late": late(2.0), "very late": late(20.0), "doubled": doubled,
          "corrupted": corrupted}


def serve_one(model, fault=None, by_layer=False, window=3):
    pair = Served(model, by_layer=by_layer, window=window)
    if fault:
        pair.network.fault = fault
    call = pair.front.submit(PROMPT, greedy())
    pair.settle()
    assert pair.held() == [0, 0]
    return pair, call


def test_one_call_by_message_is_served(model, slow):
    pair, call = serve_one(model)
    assert call.output == slow()
    kinds = [type(unpack(sent.data)).__name__ for sent in pair.network.log]
    assert kinds == ["Prefill", "Granted", "Read", *["Block"] * 3, "Read", *["Block"] * 2, "Ack"]
    assert pair.front.counts == {"read_there": 1}


NUM_MESSAGES = 10


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", range(NUM_MESSAGES))
def test_a_fault_at_any_message_costs_time_and_never_a_token(model, slow, number, fault):
    pair, call = serve_one(model, only(number, FAULTS[fault]))
    assert call.output == slow()
    assert len(pair.network.log) >= NUM_MESSAGES or number < 3


@pytest.mark.parametrize("fault", ["lost", "corrupted"])
@pytest.mark.parametrize("number", range(2, 9))             # reads and blocks
def test_what_was_lost_once_is_asked_for_again(model, slow, number, fault):
    """All blocks come: nothing but the end of the prompt is computed."""
    pair, call = serve_one(model, only(number, FAULTS[fault]))
    assert call.output == slow()
    assert pair.decode.counts["failed"] == 0
    assert pair.decode.counts["parts"] == 5
    assert pair.decode.counts["asked_again"] >= 1
    assert pair.now < 3


@pytest.mark.parametrize("fault", ["lost", "corrupted", "very late", "doubled"])
def test_a_fault_at_every_message_too(model, slow, fault):
    """Nothing that was sent arrives as it should: the decode side reads the prompt itself."""
    pair, call = serve_one(model, FAULTS[fault])
    assert call.output == slow()
    assert pair.front.counts["read_here"] == (fault != "doubled")


@pytest.mark.parametrize("fault", [lost, corrupted], ids=["lost", "corrupted"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_block_that_never_comes_right_is_computed(model, slow, fault, by_layer):
    """The third of five blocks: two are used, the others are computed."""
    third = []

    def strike(sent):
        message = unpack(sent.data)
        if isinstance(message, Block):
            third.extend([message.key] * (message.key not in third))
            if third.index(message.key) == 2:
                return fault(sent)
        return [(0.0, sent.data)]
    pair, call = serve_one(model, strike, by_layer, window=20)
    assert call.output == slow()
    assert pair.decode.counts["failed"] == 1
    prefills = [share.num_tokens for record in pair.decode.engine.records
                for share in record.shares if share.kind == "prefill"]
    assert prefills == [28 - 2 * SIZE]


def test_messages_mixed_up_at_random(model, slow):
    """Each is lost, late, doubled, damaged or left alone, by chance; eight prompts at once."""
    from random import Random
    for seed in range(12):
        rng, pair = Random(seed), Served(model, window=2)
        pair.network.fault = lambda sent, rng=rng: rng.choice(
            [lost, late(rng.uniform(0, 3)), doubled, corrupted]
            + 8 * [lambda sent: [(0.0, sent.data)]])(sent)
        prompts = [[60 + i, *PROMPT[:size]] for i, size in enumerate([9, 14, 26, 3])]
        calls = [pair.front.submit(prompt, greedy()) for prompt in prompts]
        pair.settle()
        assert [call.output for call in calls] == [slow(prompt) for prompt in prompts]
        assert pair.held() == [0, 0]


def test_what_comes_after_its_request_has_left_is_dropped(model, slow):
    """The blocks it would have gone to are another's by then."""
    pair = Pair(model, num_blocks=(40, 7))
    pair.network.fault = lambda sent: late(
        4.0 if isinstance(unpack(sent.data), Block) else 0.0)(sent)
    first = pair.decode.accept(pair.prefill.run(PROMPT, greedy()), PROMPT, greedy())
    while not pair.sent(Block):
        pair.turn()
    pair.decode.abort(first.id)
    other = [9, *PROMPT[1:]]
    second = pair.decode.engine.submit(other, greedy())
    pair.settle()
    while pair.now < 6:
        pair.turn()
    assert pair.decode.counts["late"] == 5
    assert second.output == slow(other)
    again = pair.decode.engine.submit(other, greedy())
    pair.settle()
    assert again.num_found == 25
    assert again.output == slow(other)


# --- either side dies ---------------------------------------------------------------------------

@pytest.mark.parametrize("tells", [True, False], ids=["it is noticed", "it seems to hang"])
@pytest.mark.parametrize("after", range(NUM_MESSAGES + 1))
def test_g50_the_prefill_side_dies_after_any_message(model, slow, after, tells):
    pair = Served(model, window=3)

    def die(sent):
        if sent.number == after:
            pair.network.kill("p", tells=tells)
        return [(0.0, sent.data)]
    pair.network.fault = die
    call = pair.front.submit(PROMPT, greedy())
    pair.settle(1.5 if tells else 20.0)             # noticed, it costs no patience
    assert call.output == slow()
    assert pair.held()[1] == 0
    later = pair.front.submit([8, *PROMPT], greedy())
    pair.settle(20.0)
    assert later.output == slow([8, *PROMPT])


@pytest.mark.parametrize("after", range(NUM_MESSAGES + 1))
def test_g50_the_decode_side_dies_after_any_message(model, after):
    """What the prefill side keeps for it is let go when the lease ends."""
    pair = Served(model, window=3)

    def die(sent):
        if sent.number == after:
            pair.network.kill("d")
        return [(0.0, sent.data)]
    pair.network.fault = die
    pair.front.submit(PROMPT, greedy())
    pair.settle(LEASE_S + 2)
    assert pair.held()[0] == 0


@pytest.mark.parametrize("turns", range(12))
def test_the_prefill_side_dies_at_any_moment_of_many(model, slow, turns):
    pair = Served(model, window=2, limits={"max_tokens_per_step": 17})
    prompts = [[60 + i, *PROMPT[:size]] for i, size in enumerate([9, 14, 26, 3])]
    calls = [pair.front.submit(prompt, greedy()) for prompt in prompts]
    for _ in range(turns):
        pair.turn()
    pair.network.kill("p", tells=turns % 2 == 0)
    pair.settle(20)
    assert [call.output for call in calls] == [slow(prompt) for prompt in prompts]
    assert pair.held()[1] == 0


@pytest.mark.parametrize("turns", range(12))
def test_a_client_leaves_at_any_moment(model, slow, turns):
    pair = Served(model, window=2, delay_s=0.25, limits={"max_tokens_per_step": 11})
    leaving, staying = (pair.front.submit([i, *PROMPT], greedy()) for i in (5, 6))
    for _ in range(turns):
        pair.turn()
    pair.front.abort(leaving)
    pair.settle(LEASE_S + 5)
    assert staying.output == slow([6, *PROMPT])
    assert pair.held() == [0, 0]
    assert len(leaving.output) < 6


@pytest.mark.parametrize("state", ["reading", "held"])
def test_the_prefill_side_can_be_told_that_a_client_left(model, state):
    pair = Pair(model, limits={"max_tokens_per_step": 9})
    request = pair.prefill.submit(PROMPT, greedy())
    pair.turn()
    while state == "held" and request.state is not State.HELD:
        pair.turn()
    pair.prefill.abort(request.id)
    pair.prefill.check()
    assert request.reason == "aborted"
    assert pair.held() == [0, 0]
    pair.settle(0.3)


def test_behind_a_lost_handoff_there_may_be_a_disk(model, slow, tmp_path):
    """The decode side's own store has the blocks that the other side does not send."""
    pair = Pair(model, store=DiskStore(tmp_path, fingerprint_of(model, SIZE), min_free_bytes=0))
    hand_off(pair)
    fresh = Pair(model, store=DiskStore(tmp_path, fingerprint_of(model, SIZE), min_free_bytes=0))
    ticket = fresh.prefill.run(PROMPT, greedy())
    fresh.network.kill("p")
    request = fresh.decode.accept(ticket, PROMPT, greedy())
    fresh.settle()
    assert request.output == slow()
    loads = [share.num_tokens for record in fresh.decode.engine.records
             for share in record.shares if share.kind == "load"]
    assert sum(loads) == 25


# --- the front ----------------------------------------------------------------------------------

def test_prompts_take_turns_among_living_readers(model, slow):
    pair = Served(model)
    pair.front.readers = ["q", "p"]
    pair.network.kill("q")
    calls = [pair.front.submit([i, *PROMPT], greedy()) for i in range(3)]
    pair.settle()
    assert pair.front.counts == {"read_there": 3}
    assert [call.output for call in calls] == [slow([i, *PROMPT]) for i in range(3)]


@pytest.mark.parametrize("num_blocks", [(2, 40), (40, 3)])
def test_what_one_side_has_no_room_for(model, slow, num_blocks):
    """The prefill side declines: read here. The decode side never could: rejected, and said so."""
    pair = Served(model, num_blocks=num_blocks)
    call = pair.front.submit(PROMPT, greedy())
    pair.settle()
    if num_blocks[0] == 2:
        assert call.output == slow()
        assert pair.front.counts == {"read_here": 1}
    else:
        assert call.request.reason.startswith("rejected: it may need notes for 32 tokens")
        assert pair.prefill.counts["acked"] == 1


def test_a_ticket_for_a_client_who_left_is_given_back_at_once(model):
    pair = Served(model)
    pair.front.abort(pair.front.submit(PROMPT, greedy()))
    pair.settle(1.0)
    while not pair.prefill.counts["granted"] or pair.prefill.leases:
        pair.turn()
    assert pair.now < LEASE_S
    assert pair.prefill.counts == {"granted": 1, "acked": 1}


def test_a_prompt_that_is_asked_for_twice_is_read_once(model, slow):
    pair = Served(model)
    pair.network.fault = only(0, doubled)
    call = pair.front.submit(PROMPT, greedy())
    pair.settle()
    assert call.output == slow()
    assert pair.prefill.counts["granted"] == 1


def test_g55_another_model_on_the_other_side_reads_nothing_for_us(make_model, model, slow):
    pair = Served(model)
    stranger = PrefillWorker("p", Pair(make_model(seed=12)).prefill.engine,
                             pair.network.link("p"))
    stranger.engine.clock = stranger.clock = lambda: pair.now
    pair.prefill = stranger
    call = pair.front.submit(PROMPT, greedy())
    pair.settle()
    assert call.output == slow()
    assert pair.front.counts == {"read_here": 1}


# --- what the engine has for it -----------------------------------------------------------------

def test_a_held_request_keeps_its_blocks_and_others_run_beside_it(model, slow):
    engine = Pair(model, num_blocks=(13, 12)).prefill.engine
    held = engine.submit(PROMPT, greedy(1), hold=True)
    engine.run()
    assert (held.state, held.reason, held.output) == (State.HELD, "length", slow()[:1])
    assert engine.stats()["held"] == 6
    assert engine.scheduler.is_idle
    other = engine.submit([9, *PROMPT[1:]], greedy())
    while engine.step() is not None:
        engine.check()
    assert other.output == slow([9, *PROMPT[1:]])
    engine.release(held.id)
    engine.check()
    assert (held.state, held.reason) == (State.FINISHED, "length")
    assert engine.stats()["held"] == 0
    assert engine.requests == {}


def test_only_a_held_request_is_released_and_any_is_aborted(model):
    engine = Pair(model).prefill.engine
    running, held = engine.submit(PROMPT, greedy()), engine.submit([9], greedy(1), hold=True)
    engine.step()
    with pytest.raises(ValueError, match="request 0 is running, not held"):
        engine.release(running.id)
    engine.abort(held.id)
    assert (held.state, held.reason) == (State.FINISHED, "aborted")
    engine.run()
    assert engine.stats()["held"] == 0


@pytest.mark.parametrize("num_written", [1, 3, 5])
def test_an_answer_is_continued_from_what_was_written_elsewhere(model, slow, num_written):
    engine = Pair(model).decode.engine
    request = engine.submit(PROMPT, greedy(), written=slow()[:num_written])
    engine.run()
    assert (request.output, request.reason) == (slow(), "length")


def test_what_was_written_may_be_all_and_is_checked(model, slow):
    engine = Pair(model).decode.engine
    done = engine.submit(PROMPT, greedy(), written=slow())
    assert (done.state, done.reason, done.output) == (State.FINISHED, "length", slow())
    assert engine.step() is None
    with pytest.raises(ValueError, match="token id 999 is outside"):
        engine.submit(PROMPT, greedy(), written=[999])
    with pytest.raises(ValueError, match="num_answers=2 of which one has tokens already"):
        engine.submit(PROMPT, greedy(), written=[9], num_answers=2)


# --- arrivals -----------------------------------------------------------------------------------

def test_what_nobody_promised_or_came_before_is_not_kept():
    arrivals, into = Arrivals(), bytearray(6)
    assert not arrivals.came(b"a", 0, 1, b"abcdef")
    arrivals.promise([b"a", b"b"])
    assert (arrivals.longest_prefix([b"a", b"b", b"c"]), arrivals.ready([b"a", b"b"])) == (2, 0)
    assert arrivals.came(b"a", 1, 2, b"def")
    assert not arrivals.came(b"a", 1, 2, b"xyz")
    assert not arrivals.read(b"a", memoryview(into))            # half of it is not it
    assert arrivals.came(b"a", 0, 2, b"abc")
    assert not arrivals.came(b"a", 0, 2, b"xyz")
    assert (arrivals.ready([b"a", b"b"]), arrivals.ready([b"b", b"a"])) == (1, 0)
    assert arrivals.read(b"a", memoryview(into))
    assert into == b"abcdef"
    assert not arrivals.read(b"a", memoryview(bytearray(7)))
    arrivals.take_back([b"a", b"b"])
    assert (arrivals.longest_prefix([b"a"]), arrivals.ready([b"a", b"b"])) == (0, 2)
    assert not arrivals.read(b"a", memoryview(into))
    assert arrivals.whole == arrivals.parts == {}


# --- messages -----------------------------------------------------------------------------------

MESSAGES = [
    Prefill(3, (1, 2, 270), Sampling(7, stop_ids={5, 9}), "ab" * 32, b"salt\x00", "agent"),
    Read("4", 2, "ab" * 32, (b"\x01" * 32, b"\xff" * 32), (7, 3), 1, 4),
    Block("4", 2, b"\x02" * 32, 0, 1, bytes(range(256))), Beat("4", 2), Ack("5", 0), Bye(),
    Refused("gone", "4", 2)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    assert unpack(pack(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_with_any_byte_changed_or_missing_is_none(message):
    data = pack(message)
    for place in range(len(data)):
        with pytest.raises(MessageError):
            unpack(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1:])
        with pytest.raises(MessageError):
            unpack(data[:place])
    with pytest.raises(MessageError):
        unpack(data + b"\x00")


def test_a_message_of_another_version_is_none():
    class Later(Beat):
        pass
    with pytest.raises(MessageError, match="of another version"):
        unpack(pack(Later("1", 2)))
