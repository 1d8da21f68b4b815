"""Traces are read whole or refused with reasons; what is made up behaves as it says it does."""

import math
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from minimodel.simulate.traces import (
    AGENT,
    CHAT,
    DAY_S,
    HOUR_S,
    MINUTE_S,
    ONE_OFF,
    TraceRequest,
    Traffic,
    full_trace,
    load_azure,
    load_mooncake,
    return_times,
    synthesise,
    tokens_per_day,
)

DATA = Path(__file__).parent.parent / "data"


def whole(name: str) -> Path:
    """A published trace, or a skip that says why."""
    try:
        return full_trace(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))


# --- a request -----------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "matchable", "blocks"), [
    (1, 0, 1), (5, 0, 1), (6, 1, 2), (10, 1, 2), (11, 2, 3), (15, 2, 3), (16, 3, 4)])
def test_the_last_token_is_never_looked_up(prompt, matchable, blocks):
    request = TraceRequest(0.0, prompt, 3, keys=tuple("abcd"), block_size=5)
    assert len(request.matchable) == matchable
    assert request.matchable == tuple("abcd")[:matchable]
    assert request.prompt_blocks == blocks


def test_a_request_does_not_change():
    with pytest.raises(FrozenInstanceError):
        TraceRequest(0.0, 1, 1).arrival_s = 2.0


# --- files ---------------------------------------------------------------------------------


def test_a_mooncake_file_is_read():
    first, exact, again, short, longer = load_mooncake(DATA / "mooncake_sample.jsonl")
    assert first == TraceRequest(0.0, 1300, 40, (7, 8), 512, tail_key=9)
    assert (exact.arrival_s, exact.keys, exact.tail_key) == (0.25, (7, 8, 21), None)
    assert exact.matchable == (7, 8)            # 1,536 tokens: the third block holds the last one
    assert again.arrival_s == 0.25              # at the same time is not backwards
    assert (short.keys, short.tail_key, short.output_tokens) == ((), 30, 0)
    assert (longer.matchable, longer.tail_key) == ((7, 8, 21), 40)


def test_an_azure_file_is_read():
    requests = load_azure(DATA / "azure_sample.csv")
    assert requests == [TraceRequest(0.0, 311, 17), TraceRequest(3.5, 29, 403),
                        TraceRequest(3.5, 5120, 1)]
    assert all(request.matchable == () for request in requests)


GOOD = '{"timestamp": 500, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(("line", "says"), [
    ('{"timestamp": 9', "not JSON"),
    ("[1, 2]", "not an object"),
    ('{"input_length": 6, "output_length": 4, "hash_ids": [1]}', "no timestamp"),
    ('{"timestamp": 500, "output_length": 4, "hash_ids": [1]}', "no input_length"),
    ('{"timestamp": 500, "input_length": 6, "hash_ids": [1]}', "no output_length"),
    ('{"timestamp": 500, "input_length": 6, "output_length": 4}', "no hash_ids"),
    (GOOD.replace("600", "null"), "no input_length"),
    (GOOD.replace("600", '"many"'), "input_length='many' must be a whole number, at least 1"),
    (GOOD.replace("600", "600.5"), "input_length=600.5 must be a whole number"),
    (GOOD.replace("600", "NaN"), "input_length=nan must be a whole number"),
    (GOOD.replace("600", "true"), "input_length=True must be a whole number"),
    (GOOD.replace("600", "0"), "input_length=0 must be a whole number, at least 1"),
    (GOOD.replace("600", "1100"), r"hash_ids=\[1, 2\] must be a list of 3 ids"),
    (GOOD.replace("[1, 2]", "7"), "hash_ids=7 must be a list of 2 ids"),
    (GOOD.replace("[1, 2]", "[1, [2]]"), "must be a list of 2 ids"),
    (GOOD.replace('length": 4', 'length": -4'), "output_length=-4 must be .*, at least 0"),
    (GOOD.replace("500", "-500"), "timestamp=-500 must be a whole number, at least 0"),
    (GOOD.replace("500", "480"), "the time runs backwards by 0.02 s: sort"),
])
def test_a_bad_mooncake_line_is_named(tmp_path, line, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ValueError, match=f"trace.jsonl, line 3: .*{says}"):
        load_mooncake(path)


@pytest.mark.parametrize(("line", "says"), [
    ("2025-03-04 10:00:01.5", "no ContextTokens"),
    ("2025-03-04 10:00:01.5,12", "no GeneratedTokens"),
    ("2025-03-04 10:00:01.5,,7", "ContextTokens='' must be a whole number"),
    ("2025-03-04 10:00:01.5,0,7", "ContextTokens='0' must be a whole number, at least 1"),
    ("2025-03-04 10:00:01.5,12,-7", "GeneratedTokens='-7' must be a whole number, at least 0"),
    ("2025-03-04 10:00:01.5,12,1e3", "GeneratedTokens='1e3' must be a whole number"),
    ("yesterday,12,7", "TIMESTAMP='yesterday' is no time: write it as"),
    ("2025-03-04 09:59:59.5,12,7", "the time runs backwards by 0.5 s"),
])
def test_a_bad_azure_line_is_named(tmp_path, line, says):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                    f"2025-03-04 10:00:00.0,5,5\n{line}\n")
    with pytest.raises(ValueError, match=f"trace.csv, line 3: {says}"):
        load_azure(path)


def test_other_column_names_are_refused(tmp_path):
    (tmp_path / "trace.csv").write_text("time,in,out\n2025-03-04 10:00:00.0,5,5\n")
    with pytest.raises(ValueError, match=r"line 2: no TIMESTAMP .* names its columns"):
        load_azure(tmp_path / "trace.csv")


@pytest.mark.parametrize("load", [load_mooncake, load_azure])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_an_empty_file_is_refused(tmp_path, load, content):
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(ValueError, match=r"no request in it|not JSON"):
        load(tmp_path / "trace")


@pytest.mark.parametrize("load", [load_mooncake, load_azure])
def test_bytes_that_are_no_text_are_refused(tmp_path, load):
    (tmp_path / "trace").write_bytes(b"\xff\xfe\x00\x81\n\x9f\x00\n")
    with pytest.raises(ValueError, match=r"trace, line [12]: "):
        load(tmp_path / "trace")


def test_a_file_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIMODEL_TRACES", raising=False)
    with pytest.raises(FileNotFoundError, match="MINIMODEL_TRACES is not set: let it name"):
        full_trace("some.jsonl")
    monkeypatch.setenv("MINIMODEL_TRACES", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has no file some.jsonl"):
        full_trace("some.jsonl")
    (tmp_path / "some.jsonl").write_text(GOOD)
    assert len(load_mooncake(full_trace("some.jsonl"))) == 1


def test_the_whole_mooncake_trace():
    requests = load_mooncake(whole("mooncake_synthetic.jsonl"))
    assert len(requests) == 3_993
    assert round(mean(request.prompt_tokens for request in requests)) == 15_325     # P-MC05
    assert sum(request.prompt_blocks for request in requests) == 121_877
    assert requests[-1].arrival_s == 1_022.025


def test_the_whole_azure_trace():
    requests = load_azure(whole("azure_conv_2023.csv"))
    assert len(requests) == 19_366
    assert (requests[0].prompt_tokens, requests[-1].output_tokens) == (374, 183)
    assert 3_501 < requests[-1].arrival_s < 3_502


# --- made up -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weeks() -> list[TraceRequest]:
    """The traffic of the book's defaults."""
    return synthesise(Traffic(), seed=1)


def sessions_of(requests, kind) -> dict[str, list[TraceRequest]]:
    sessions = defaultdict(list)
    for request in requests:
        if request.session.startswith(kind.name):
            sessions[request.session].append(request)
    return sessions


def test_one_seed_makes_one_trace():
    traffic = Traffic(days=3)
    assert synthesise(traffic, seed=5) == synthesise(traffic, seed=5)
    assert synthesise(traffic, seed=5) != synthesise(traffic, seed=6)


def test_requests_come_in_order_and_within_the_days(weeks):
    times = [request.arrival_s for request in weeks]
    assert times == sorted(times)
    assert times[0] > 0 and 27 * DAY_S < times[-1] < 28 * DAY_S


def test_weeks_are_small_enough_for_a_notebook(weeks):
    assert 5_000 < len(weeks) < 20_000
    assert sum(len(request.keys) for request in weeks) < 600_000


@pytest.mark.parametrize("kind", [CHAT, AGENT, ONE_OFF])
def test_so_many_sessions_of_a_kind_begin(weeks, kind):
    expected = 28 * kind.sessions_per_day
    assert abs(len(sessions_of(weeks, kind)) - expected) < 4 * math.sqrt(expected)
    retentions = {turn.retention for turns in sessions_of(weeks, kind).values() for turn in turns}
    assert retentions == {kind.retention}


def test_a_turns_prompt_is_the_history(weeks):
    for kind in (CHAT, AGENT):
        for turns in sessions_of(weeks, kind).values():
            for turn, later in pairwise(turns):
                assert later.keys[:len(turn.keys)] == turn.keys
                assert later.prompt_tokens > turn.prompt_tokens + turn.output_tokens
                assert later.arrival_s > turn.arrival_s


def test_keys_are_of_full_blocks_whose_notes_exist(weeks):
    for request in weeks:
        written = request.prompt_tokens + request.output_tokens - 1
        assert len(request.keys) == written // 512
        assert len(request.matchable) == (request.prompt_tokens - 1) // 512
        assert request.prompt_tokens + request.output_tokens <= 131_072


def test_equal_keys_mean_equal_beginnings(weeks):
    before = {}
    for request in weeks:
        for previous, key in pairwise((None, *request.keys)):
            assert before.setdefault(key, previous) == previous


def test_only_openings_are_shared_and_only_within_a_kind(weeks):
    users = defaultdict(set)
    for request in weeks:
        for key in request.keys:
            users[key].add(request.session)
    shared = [sessions for sessions in users.values() if len(sessions) > 1]
    assert len(shared) > 100
    assert all(len({session.split()[0] for session in sessions}) == 1 for sessions in shared)
    assert not any(session.startswith("one-off") for sessions in shared for session in sessions)


def test_popular_openings_follow_zipf():
    """Rank 1 of 12 has a share of 1 / H(12) = 0.32, twice as much as rank 2."""
    kind = replace(AGENT, sessions_per_day=3_000, mean_turns=1)
    requests = synthesise(Traffic(days=1, kinds=(kind,)), seed=3)
    first = [n for _, n in Counter(request.keys[0] for request in requests).most_common()]
    harmonic = sum(1 / rank for rank in range(1, 13))
    assert len(first) == 12
    assert first[0] / len(requests) == pytest.approx(1 / harmonic, rel=0.15)
    assert first[0] / first[1] == pytest.approx(2, rel=0.25)


def test_sessions_have_as_many_turns_as_stated():
    kind = replace(CHAT, pauses=((1.0, 1.0),), input_tokens=5, output_tokens=5)
    sessions = sessions_of(synthesise(Traffic(days=30, kinds=(kind,)), seed=3), kind).values()
    assert mean(map(len, sessions)) == pytest.approx(6, rel=0.1)
    assert mean(len(turns) == 1 for turns in sessions) == pytest.approx(1 / 6, abs=0.04)


@pytest.mark.parametrize("kind", [CHAT, AGENT])
@pytest.mark.parametrize("seconds", [20.0, 3 * MINUTE_S, HOUR_S, DAY_S])
def test_pauses_are_distributed_as_stated(kind, seconds):
    kind = replace(kind, input_tokens=5, output_tokens=5, mean_turns=30)
    requests = synthesise(Traffic(days=200, kinds=(replace(kind, sessions_per_day=5),)), seed=3)
    pauses = [later.arrival_s - turn.arrival_s for turns in sessions_of(requests, kind).values()
              for turn, later in pairwise(turns)]
    assert len(pauses) > 10_000
    share = mean(pause > seconds for pause in pauses)
    assert share == pytest.approx(kind.share_of_pauses_over(seconds), abs=0.01)


def test_the_stated_shares_by_hand():
    kind = replace(CHAT, pauses=((0.75, 10.0), (0.25, 1_000.0)))
    assert kind.share_of_pauses_over(0) == 1
    assert kind.share_of_pauses_over(10) == pytest.approx(0.75 / math.e + 0.25 * math.exp(-0.01))


def test_a_day_has_its_rhythm_or_none():
    def share_by_day(rhythm):
        kinds = (replace(ONE_OFF, sessions_per_day=5_000),)
        requests = synthesise(Traffic(days=4, kinds=kinds, day_rhythm=rhythm), seed=3)
        return mean(8 <= request.arrival_s / HOUR_S % 24 < 20 for request in requests)

    assert share_by_day(0) == pytest.approx(0.5, abs=0.02)
    assert share_by_day(1) == pytest.approx(0.5 + 1 / math.pi, abs=0.02)


def test_a_full_context_ends_a_session():
    kind = replace(CHAT, mean_turns=1_000)
    requests = synthesise(Traffic(days=2, kinds=(kind,), context=9_000), seed=3)
    assert max(request.prompt_tokens + request.output_tokens for request in requests) <= 9_000


def test_traffic_can_be_many_times_as_much():
    few, many = Traffic(days=5), Traffic(days=5).times(7.5)
    assert [kind.sessions_per_day for kind in many.kinds] == [300, 60, 300]
    assert replace(many, kinds=few.kinds) == few
    assert len(synthesise(many, 3)) == pytest.approx(7.5 * len(synthesise(few, 3)), rel=0.3)


@pytest.mark.parametrize(("changes", "says"), [
    ({"days": 0}, "days=0 must be above 0"), ({"days": math.inf}, "days=inf must be .* finite"),
    ({"block_size": -16}, "block_size=-16 must be above 0"), ({"context": 0}, "context=0 must be"),
    ({"day_rhythm": 1.5}, "day_rhythm=1.5 must lie between 0, even, and 1"),
])
def test_traffic_that_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says):
        Traffic(**changes)


@pytest.mark.parametrize(("changes", "says"), [
    ({"sessions_per_day": 0}, "sessions_per_day=0 must be above 0"),
    ({"input_tokens": math.nan}, "input_tokens=nan must be above 0"),
    ({"output_tokens": -1}, "output_tokens=-1 must be above 0"),
    ({"mean_turns": 0.5}, "mean_turns=0.5 must be at least 1"),
    ({"num_openings": -1}, "num_openings=-1"), ({"opening_tokens": -9}, "opening_tokens=-9"),
    ({"pauses": ((0.5, 1.0), (0.3, 9.0))}, "chat: the shares of its pauses sum to 0.8"),
    ({"pauses": ((1.0, 0.0),)}, "mean_pause=0.0 must be above 0"),
])
def test_a_kind_that_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(CHAT, **changes)


# --- what a trace says ---------------------------------------------------------------------


def test_return_times_by_hand():
    requests = [TraceRequest(0.0, 11, 9, ("a", "b"), 5), TraceRequest(3.0, 14, 2, ("a", "c"), 5),
                TraceRequest(10.0, 11, 1, ("a", "b"), 5), TraceRequest(11.0, 5, 1, ("a",), 5),
                TraceRequest(12.0, 6, 1, ("a",), 5)]
    assert list(return_times(requests)) == [
        math.inf, math.inf, 3.0, math.inf, 7.0, 10.0, 1.0]      # at 11.0 nothing is asked for


def test_tokens_per_day_by_hand():
    requests = [TraceRequest(100.0, 7, 3), TraceRequest(100.0 + DAY_S / 2, 11, 2)]
    assert tokens_per_day(requests) == 2 * (7 + 3 + 11 + 2)
    with pytest.raises(ValueError, match=r"2 request.s. within 0 s make no day"):
        tokens_per_day([requests[0], requests[0]])


@pytest.mark.parametrize("module", ["traces", "replay"])
def test_no_torch_is_needed(module):
    code = (f"import sys, minimodel.simulate.{module}\n"
            "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
            "sys.exit(f'brings {heavy}' if heavy else 0)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
