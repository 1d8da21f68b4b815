"""Chapter 15: its fleet counts what it should, its half hours are what they say, its drawings."""

import hashlib
import itertools
import re
from collections import Counter

import pytest
import torch

from minimodel.cluster.router import Ask, ByOpening, Cost, Router, longest_prefix, round_robin
from minimodel.lesson import chapter_15
from minimodel.lesson.chapter_15 import Fleet, Lean, Outcome, Visitor
from minimodel.lesson.exercises.chapter_15 import CHAPTER, HOME, REACTION, reaction
from minimodel.lesson.exercises.engine import judge
from minimodel.simulate.cluster import Served
from minimodel.simulate.traces import TraceRequest
from minimodel.tokenizer import decode

TICKS = itertools.count()


def visitor(at, first, blocks, extra=3, town=0):
    """A prompt of `blocks` blocks that begin with a token of their own, and some tokens more."""
    return Visitor(at, town, [first] * (16 * blocks) + [first + 1] * extra)


@pytest.fixture
def fleet(make_model):
    def make(policy, **options):
        return Fleet(make_model(dtype=torch.float32, context=400), policy, num_blocks=40, **options)
    return make


# --- who comes -------------------------------------------------------------------------------

def test_visitors_are_the_same_every_time_and_prefer_the_first_towns():
    crowd = chapter_15.visitors(60)
    assert crowd == chapter_15.visitors(60) != chapter_15.visitors(60, seed=16)
    assert [v.at for v in crowd] == sorted(v.at for v in crowd)
    asked = Counter(v.town for v in crowd)
    assert asked[0] == max(asked.values()) and len(asked) > 5
    prompts = {v.town: v.prompt[:400] for v in crowd}
    assert all(v.prompt[:400] == prompts[v.town] for v in crowd)
    assert len({tuple(p) for p in prompts.values()}) == len(asked)
    assert len({tuple(v.prompt) for v in crowd if v.town == 0}) == 3        # three facts


def test_a_prompt_goes_up_to_the_value():
    book = chapter_15.towns(1)[0]
    fact = book.facts[1]
    text = decode(chapter_15.prompt_for(book, fact))
    assert text.endswith(f"{fact.question}A: {fact.opening}") and book.text in text


def test_a_herd_asks_about_one_town():
    crowd = chapter_15.herd(7, a_turn=3)
    assert [v.at for v in crowd] == [0, 0, 0, 1, 1, 1, 2]
    assert len({tuple(v.prompt[:400]) for v in crowd}) == 1
    assert len({tuple(v.prompt) for v in crowd}) == 3


# --- real engines, in turns ------------------------------------------------------------------

def test_in_turns_each_replica_reads_a_prompt_anew(fleet):
    crowd = [visitor(20 * i, 65, 5) for i in range(5)]          # 83 tokens, five can be found
    one = fleet(round_robin)
    answered = one.serve(crowd)
    assert [a.choice.replica for a in answered] == list("ABCAB")
    assert [a.found for a in answered] == [0, 0, 0, 80, 80]
    assert one.usage.hit_tokens == 160 and one.usage.input_tokens == 5 * 83
    assert one.computed == {"A": 83 + 3, "B": 83 + 3, "C": 83}
    assert one.hit_share == pytest.approx(160 / 415)


def test_a_prompt_waits_for_as_many_turns_as_it_has_pieces(fleet):
    one = fleet(longest_prefix)
    answered = one.serve([visitor(0, 65, 9, extra=5), visitor(30, 65, 9, extra=5)])
    assert [a.wait for a in answered] == [3, 1]                 # 149 tokens, 64 in a turn; then 5
    assert one.wait(100) == 3 and one.wait(0) == 1
    assert all(replica.flights == set() for replica in one.router.replicas.values())


def test_who_comes_meanwhile_is_expected_to_find_what_is_being_read(fleet):
    one = fleet(longest_prefix)
    one.serve([visitor(0, 65, 9), visitor(1, 65, 9)])
    assert one.answered[1].choice.expected_hit == 144
    assert one.missing == 144 - one.answered[1].found > 0 == one.unforeseen


def test_events_are_heard_once_a_turn(fleet):
    one = fleet(longest_prefix, hears=True)
    one.serve([visitor(0, 65, 9)])
    assert one.router.index.match(one.ask([65] * 145).keys) == {"A": 9}
    one.serve([visitor(0, 65, 9)])
    assert (one.missing, one.unforeseen) == (0, 0) and one.answered[1].found == 144
    one.restart("A")
    assert one.engines["A"].pool.listener.epoch == 1
    one.serve([visitor(5, 70, 2)])                  # five turns pass before it is routed
    assert one.router.index.match(one.ask([65] * 145).keys) == {}


def test_nobody_tells_the_router_of_a_restart(fleet):
    one = fleet(longest_prefix)
    one.serve([visitor(0, 65, 9)])
    one.restart("A")
    again = one.serve([visitor(0, 65, 9)])[0]
    assert (again.choice.replica, again.choice.expected_hit, again.found) == ("A", 144, 0)
    assert one.missing == 144
    assert again.request.output == one.answered[0].request.output


def test_who_can_never_be_served_is_refused_and_not_counted(fleet):
    one = fleet(longest_prefix)
    with pytest.raises(ValueError, match=r"visitor at 3 is rejected: 643 tokens"):
        one.serve([visitor(3, 65, 40)])
    assert all(replica.flights == set() for replica in one.router.replicas.values())


def test_whatever_the_policy_the_tokens_are_the_same(fleet):
    crowd = [visitor(2 * i, 65 + i % 3, 3 + i % 3, extra=1 + i % 5) for i in range(12)]
    outputs = []
    for policy in (round_robin, longest_prefix, ByOpening(2), Cost(1.0), Lean(0.9)):
        one = fleet(policy)
        outputs.append([a.request.output for a in one.serve(crowd)])
        assert one.usage.output_tokens == 12 * 4
        for engine in one.engines.values():
            engine.check()
    assert all(output == outputs[0] for output in outputs)


# --- the weight ------------------------------------------------------------------------------

def test_half_the_weight_is_the_cost_and_the_ends_are_load_and_affinity():
    router = Router("ab", Lean(0.5))
    router.index.stored("a", range(10))
    asked = Ask(range(10), 170, 8)
    for waiting, best in ((150, "a"), (170, "b")):
        with router.serving(Ask([], waiting, 8)) as other:
            busy, idle = other.replica, "ab".strip(other.replica)
            router.index.drop(idle)
            router.index.stored(busy, range(10))
            chosen = {weight: Router.route(_with(router, Lean(weight)), asked).replica
                      for weight in (0.0, 0.5, 1.0)}
            assert chosen == {0.0: idle, 0.5: busy if best == "a" else idle, 1.0: busy}


def _with(router, policy):
    router.policy = policy
    return router


def test_a_weight_outside_is_refused():
    with pytest.raises(ValueError, match=r"weight=1\.5 must lie between 0 \(load\) and 1"):
        Lean(1.5)


# --- modelled half hours ---------------------------------------------------------------------

def test_a_half_hour_has_so_many_sessions_a_minute():
    trace = chapter_15.half_hour(12)
    sessions = {request.session for request in trace}
    assert 0.8 < len(sessions) / (12 * 28.8) < 1.2
    assert trace == chapter_15.half_hour(12) and max(r.prompt_tokens for r in trace) < 32_768


def test_strangers_come_for_five_minutes_with_one_document():
    viral = chapter_15.half_hour(5, viral=True)
    strangers = [r for r in viral if str(r.session).startswith("viral")]
    assert len(viral) - len(strangers) == len(chapter_15.half_hour(5))
    assert 600 < strangers[0].arrival_s < strangers[-1].arrival_s < 900
    assert 0.85 < len(strangers) / (8 * 300) < 1.15
    assert len({r.keys[:24] for r in strangers}) == 1
    beyond = [key for r in strangers for key in r.keys[24:]]
    assert len(set(beyond)) == len(beyond)
    assert [r.arrival_s for r in viral] == sorted(r.arrival_s for r in viral)


def served(replica, prompt, hit, first_s, arrival_s=0.0):
    return Served(TraceRequest(arrival_s, prompt, 5), replica, hit, first_s, arrival_s + first_s)


def test_an_outcome_adds_up():
    outcome = Outcome([served("A", 100, 50, 1.0), served("B", 300, 30, 4.0, 61.0)],
                      {"A": 50, "B": 270})
    assert outcome.hit_share == 0.2 and outcome.first_token_s(100) == 4.0
    assert outcome.spread == pytest.approx(270 / 160)
    assert outcome.by_minute(50) == {0: 1.0, 1: 4.0}


def test_a_modelled_run_serves_everybody_and_counts_what_is_read():
    trace = chapter_15.half_hour(4)
    outcome = chapter_15.model_run(trace, longest_prefix)
    assert len(outcome.served) == len(trace) and set(outcome.read) == set("ABCD")
    total = sum(r.prompt_tokens for r in trace)
    assert sum(outcome.read.values()) == total - round(outcome.hit_share * total)
    worse = chapter_15.model_run(trace, round_robin)
    assert worse.hit_share < outcome.hit_share - 0.1
    assert sum(worse.read.values()) > 1.3 * sum(outcome.read.values())


# --- the explorable's recorded runs ------------------------------------------------------------

def test_the_recorded_runs_are_those_of_the_present_code():
    """If this fails after a change of the simulator: benchmarks/routing.py --table FILE."""
    for weight, sessions, viral in ((0.5, 10, False), (0.75, 10, True)):
        row = chapter_15.lean_row(weight, sessions, viral)
        kept = chapter_15.lean_lookup(weight, sessions, viral)
        assert kept["hit"] == pytest.approx(row["hit"], abs=0.5)
        assert kept["p99"] == pytest.approx(row["p99"], rel=0.05)
        assert [kept[letter] for letter in "abcd"] == pytest.approx(row["work"], abs=1.0)


def test_the_recorded_runs_say_what_the_chapter_says_of_them():
    for sessions in chapter_15.LOADS:
        quiet, viral = ({weight: chapter_15.lean_lookup(weight, sessions, hot)
                         for weight in chapter_15.WEIGHTS} for hot in (False, True))
        assert quiet[0.75]["p99"] <= quiet[0.5]["p99"] < quiet[0.0]["p99"]
        assert quiet[0.0]["hit"] < quiet[0.25]["hit"] < quiet[0.5]["hit"]
        assert viral[1.0]["p99"] > viral[0.75]["p99"] > 3 * viral[0.5]["p99"]
        for row in (*quiet.values(), *viral.values()):
            assert sum(row[letter] for letter in "abcd") == pytest.approx(100, abs=0.05)
            assert row["spread"] >= 1 and row["p50"] < row["p99"]


def test_every_setting_of_the_explorable_is_recorded():
    found = {(weight, sessions, viral): chapter_15.lean_lookup(weight, sessions, viral)["p99"]
             for weight, sessions, viral in itertools.product(
                 chapter_15.WEIGHTS, chapter_15.LOADS, (False, True))}
    assert len(found) == 48 and len(set(found.values())) > 40
    assert "p99" in repr(chapter_15.lean_explorable())


# --- drawings --------------------------------------------------------------------------------

def test_lots_show_who_moves():
    numbers = {"p": {"A": 0.2, "B": 0.9, "C": 0.5}, "q": {"A": 0.8, "B": 0.3, "C": 0.1},
               "r": {"A": 0.4, "B": 0.7, "C": 0.6}}
    drawing = chapter_15.lots_drawing(numbers, "C")
    assert "When C is lost, 1 openings move" in drawing.alt
    assert len(re.findall(r'height="21" rx="2" style="fill:none', drawing)) == 3


def test_figures_say_what_they_were_given(fleet):
    one, two = fleet(round_robin), fleet(longest_prefix)
    for each in (one, two):
        each.serve([visitor(3 * i, 65 + i % 2, 4) for i in range(6)])
    table = chapter_15.policies_figure({"round robin": one, "longest prefix": two}).table
    assert set(table["kind"]) == {"measured"}
    assert "the same 6 visitors" in chapter_15.policies_figure({"a": one}).alt
    assert table["y"][:2] == [100 * one.hit_share, 100 * two.hit_share]
    promises = chapter_15.promises_figure({"a": one, "b": two})
    assert promises.table["y"] == [one.missing, two.missing, one.unforeseen, two.unforeseen]
    outcomes = {name: Outcome([served("A", 100, 60, s, 60.0 * m) for m in range(5, 25)],
                              {"A": 40 * 20})
                for name, s in (("least load", 2.0), ("one cost", 1.0))}
    figure = chapter_15.trace_figure(outcomes, "T")
    assert set(figure.table["kind"]) == {"modelled"} and "one cost: 60% found" in figure.alt
    hot = chapter_15.viral_figure(outcomes)
    queued = {"least load": Outcome([served("A", 9, 4, 30.0 if m in (7, 8) else 1.0, 60.0 * m)
                                     for m in range(5, 25)], {"A": 100})}
    assert "up to 30.0 s, above 10 s from minute 7 to 9" in chapter_15.viral_figure(queued).alt
    assert set(hot.table["kind"]) == {"modelled"} and "least load: up to 2.0 s" in hot.alt


# --- the exercises' own answers --------------------------------------------------------------

def test_reactions_cover_all_four():
    assert reaction(2, 5, 1, 9, 0) == reaction(2, 5, 2, 4, 0) == "ignore"
    assert reaction(2, 5, 2, 5, 5) == "apply"
    assert reaction(2, 5, 2, 7, 5) == reaction(2, 5, 3, 0, 0) == "replay"
    assert reaction(2, 5, 2, 7, 6) == reaction(2, 5, 3, 4, 1) == "begin anew"


@pytest.mark.parametrize(("id", "answer", "words"), [
    ("15.1", (5_760, 2_400), "other way round"), ("15.1", (1_440, 5_760), "fair guess"),
    ("15.1", (2_400, 7_200), "first finds nothing"), ("15.2", (12_400, 31), "either place"),
    ("15.2", (12_000, 31), "400 tokens that"), ("15.7", (1_000, 1_000), "left the others alone"),
    ("15.7", (7_000, 0), "must move"), ("15.7", (8_000, 1_000), "Not quite all"),
    ("15.3", lambda waiting, remembered, length: min(waiting, key=waiting.get), "soonest"),
    ("15.3", lambda waiting, remembered, length: min(
        sorted(waiting), key=lambda name: waiting[name] - remembered.get(name, 0)),
     "is as soon and stands before it")])
def test_a_likely_mistake_is_met_with_its_reason(id, answer, words):
    verdict = judge(CHAPTER[id], answer)
    assert not verdict.passed and words in verdict.message


def on_a_ring(opening, names, points=100):
    """Consistent hashing: another right answer, if a copy has points enough."""
    def place(text):
        return hashlib.sha256(text.encode()).hexdigest()

    ring = sorted((place(f"{name} {i}"), name) for name in names for i in range(points))
    return next((name for at, name in ring if at >= place(opening)), ring[0][1])


def test_a_ring_is_a_right_answer_too():
    assert judge(HOME, on_a_ring).passed
    assert "not fair" in judge(HOME, lambda *given: on_a_ring(*given, points=1)).message
    highest = judge(HOME, lambda opening, names: max(
        names, key=lambda name: hashlib.md5(f"{opening} {name}".encode()).digest()))
    assert highest.passed


@pytest.mark.parametrize(("home", "words"), [
    (lambda opening, names: sorted(names)[sum(opening.encode()) % len(names)], "did not live"),
    (lambda opening, names: names[0], "order of the names"),
    (lambda opening, names: min(names), "not fair"),
    (lambda opening, names: "elsewhere", "is no copy"),
    (lambda opening, names: names[:1], "is no copy"),
    (lambda opening, names: min(names, key=lambda name: hash(f"{name}{opening}")), "process"),
    (lambda opening, names: names[next(TICKS) // 7 % len(names)], "by chance")])
def test_other_homes_are_refused(home, words):
    verdict = judge(HOME, home)
    assert not verdict.passed and words in verdict.message


def counted(lives, name, tokens, answer, *, late=False, swallow=False, forget=False,
            put_back=False, catches=BaseException):
    life = lives[name]
    before = life.to_read
    life.to_read += 0 if forget else tokens
    try:
        answer()
    except BaseException as error:
        if not isinstance(error, catches):
            raise
        life.to_read -= 0 if forget else tokens
        if not swallow:
            raise
        return
    (lives[name] if late else life).to_read -= 0 if forget else tokens
    if put_back:
        life.to_read = before


@pytest.mark.parametrize(("fault", "words"), [
    ({"late": True}, "its new life now counts -300"), ({"swallow": True}, "let the error pass"),
    ({"forget": True}, "370 should wait"), ({"put_back": True}, "put back the count of before"),
    ({"catches": ConnectionResetError}, "raised TimeoutError"),
    ({"catches": Exception}, "raised CancelledError")])
def test_each_way_to_count_wrongly_is_named(fault, words):
    verdict = judge(CHAPTER["15.5"], lambda *given: counted(*given, **fault))
    assert not verdict.passed and words in verdict.message
    assert judge(CHAPTER["15.5"], counted).passed


@pytest.mark.parametrize("wrongly", [
    lambda e, x, o, n, k: "apply" if n == x else reaction(e, x, o, n, k),
    lambda e, x, o, n, k: "replay" if reaction(e, x, o, n, k) == "begin anew"
    else reaction(e, x, o, n, k),
    lambda e, x, o, n, k: "ignore" if o != e else reaction(e, x, o, n, k)])
def test_other_reactions_are_refused(wrongly):
    assert not judge(REACTION, wrongly).passed
