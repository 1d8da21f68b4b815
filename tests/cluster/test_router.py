"""The router: each policy's choice, loads that only requests change, replicas that come and go."""

import random
from collections import Counter
from contextlib import ExitStack

import pytest

from minimodel.cluster.index import PrefixIndex
from minimodel.cluster.router import (
    Ask,
    ByOpening,
    Cost,
    Router,
    least_loaded,
    longest_prefix,
    round_robin,
)

POLICIES = {"round robin": round_robin, "least loaded": least_loaded,
            "longest prefix": longest_prefix, "by opening": ByOpening(2),
            "cost": Cost(read_s=0.01), "cost, crowded": Cost(0.01, 0.7, 60, 3.0)}


def ask(keys="", prompt_tokens=None, max_tokens=10):
    """A prompt of blocks of five tokens, one letter each, and two tokens more."""
    tokens = 5 * len(keys) + 2 if prompt_tokens is None else prompt_tokens
    return Ask(list(keys), tokens, max_tokens, block_size=5)


def names(router, count, of=lambda i: ask()):
    """Where so many requests go, all served at once."""
    with ExitStack() as stack:
        return [stack.enter_context(router.serving(of(i))).replica for i in range(count)]


# --- policies -----------------------------------------------------------------------------------

def test_round_robin_takes_turns_whatever_the_load():
    router = Router("abc", round_robin)
    sizes = [500, 3, 3, 500, 3, 3]
    assert names(router, 6, lambda i: ask(prompt_tokens=sizes[i])) == list("abcabc")


def test_least_loaded_counts_tokens():
    router = Router("ab", least_loaded)
    sizes = [100, 10, 10, 10, 200, 20]
    assert names(router, 6, lambda i: ask(prompt_tokens=sizes[i])) == list("abbbba")


def test_g64_a_few_long_requests_weigh_more_than_many_short_ones():
    router = Router("ab", least_loaded)
    with router.serving(ask(prompt_tokens=3_000)) as first:
        short = names(router, 30, lambda i: ask(prompt_tokens=50))
        assert set(short) == {"ab".strip(first.replica)}


def test_longest_prefix_goes_where_most_is_remembered():
    router = Router("abc", longest_prefix)
    router.index.stored("b", "pq")
    router.index.stored("c", "pqr")
    choice = router.route(ask("pqrs"))
    assert (choice.replica, choice.expected_hit) == ("c", 15)
    assert router.route(ask("pqx")).expected_hit == 10
    assert router.route(ask("xyz")).expected_hit == 0


def test_g58_a_prompt_that_nobody_knows_goes_to_the_least_busy():
    router = Router("abc", longest_prefix)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(router.serving(ask("p")))           # both to the first
        free = {name for name, replica in router.replicas.items() if not replica.flights}
        assert router.route(ask("z")).replica in free


def test_one_opening_stays_with_one_replica_and_others_spread():
    router = Router("abcd", ByOpening(2))
    openings = [f"{a}{b}" for a in "pqrstuvw" for b in "xyz"]
    home = {opening: router.route(ask(opening)).replica for opening in openings}
    for tail in ("", "k", "klmn"):
        assert {opening: router.route(ask(opening + tail)).replica for opening in openings} == home
    assert set(home.values()) == set("abcd")
    assert max(Counter(home.values()).values()) < len(openings) / 2


def test_only_a_lost_replica_s_openings_move():
    router = Router("abcd", ByOpening(1))
    home = {key: router.route(ask(key)).replica for key in "pqrstuvwxyz"}
    router.lost("b")
    for key, name in home.items():
        assert (router.route(ask(key)).replica == name) == (name != "b")
    router.joined("b")
    assert {key: router.route(ask(key)).replica for key in home} == home


def test_cost_weighs_what_is_remembered_against_who_waits():
    """Reading 40 tokens beats waiting behind 100 and reading 20; behind 10 it does not."""
    for waiting, best in ((100, "b"), (10, "a")):
        router = Router("ab", Cost(read_s=0.5))
        router.index.stored("a", "pqrs")
        with ExitStack() as stack:
            while router.replicas["a"].to_read < waiting:
                flight = stack.enter_context(router.serving(ask("pqrs", 30)))
                if flight.replica == "b":
                    router.replicas["b"].flights.clear()
                    router.index.drop("b")
                    break
            router.replicas["a"].flights = {flight.flight}
            flight.flight.to_read = waiting
            assert router.route(ask("pqrs", 40)).replica == best


def test_without_affinity_cost_is_load_alone():
    router = Router("ab", Cost(read_s=0.5, affinity=0.0))
    router.index.stored("a", "pqrs")
    with router.serving(ask("z", 3)) as first:
        other = "ab".strip(first.replica)
        assert router.route(ask("pqrs")).replica == other


def test_a_crowded_memory_costs():
    router = Router("ab", Cost(read_s=0.01, memory_tokens=100, crowded_s=50.0))
    router.index.stored("a", "pqrs")
    with router.serving(ask("pqrs", max_tokens=80)) as first:
        first.flight.has_begun()
        assert first.replica == "a"
        assert router.route(ask("pqrs")).replica == "b"
        easy = Router("ab", Cost(read_s=0.01), router.index)
        assert easy.route(ask("pqrs")).replica == "a"


@pytest.mark.parametrize("wrong", [{"read_s": 0}, {"affinity": 1.1}, {"affinity": -0.1},
                                   {"memory_tokens": 0}, {"crowded_s": -1}])
def test_impossible_costs_are_refused(wrong):
    with pytest.raises(ValueError, match="read_s and memory_tokens must be above 0"):
        Cost(**{"read_s": 0.1, **wrong})


# --- counts -------------------------------------------------------------------------------------

def test_a_request_counts_while_it_is_served_however_that_ends():
    router = Router("a", least_loaded)
    with pytest.raises(RuntimeError, match="the client left"), router.serving(ask("pq")) as choice:
        assert router.replicas["a"].to_read == 12
        assert router.replicas["a"].to_keep == 22
        choice.flight.has_begun()
        assert router.replicas["a"].to_read == 0
        assert router.replicas["a"].to_keep == 22
        raise RuntimeError("the client left")
    assert router.replicas["a"].to_keep == 0


def test_what_is_remembered_need_not_be_read():
    router = Router("a", least_loaded)
    with router.serving(ask("pq")):
        pass
    with router.serving(ask("pqr")) as choice:
        assert choice.expected_hit == 10
        assert router.replicas["a"].to_read == 7


def test_g59_looking_changes_no_count():
    router = Router("abc", least_loaded)
    with router.serving(ask("p")):
        before = {name: replica.to_keep for name, replica in router.replicas.items()}
        for _ in range(5):
            router.route(ask("q"))
        assert {name: replica.to_keep for name, replica in router.replicas.items()} == before


def test_g61_a_request_of_an_earlier_life_changes_no_count_of_the_new_one():
    router = Router("a", least_loaded)
    with router.serving(ask("pq")):
        router.lost("a")
        router.joined("a")
        assert router.replicas["a"].to_keep == 0
        with router.serving(ask("x")) as second:
            assert second.expected_hit == 0
    assert router.replicas["a"].flights == set()


@pytest.mark.parametrize("name", POLICIES)
def test_random_lives(name):
    """Requests come and end in any order, replicas die and return: no count drifts."""
    rng, index = random.Random(f"lives/{name}"), PrefixIndex(capacity=30)
    router = Router("abcd", POLICIES[name], index)
    served, lost = [], set()
    for _ in range(2_000):
        roll = rng.random()
        if roll < 0.5:
            keys = [f"{rng.randint(0, 3)}"]
            for _ in range(rng.randint(0, 5)):
                keys.append(keys[-1] + rng.choice("xy"))
            stack = ExitStack()
            choice = stack.enter_context(router.serving(Ask(keys, 5 * len(keys) + 1, 7, 5)))
            assert choice.replica not in lost
            assert 0 <= choice.expected_hit < 5 * len(keys) + 1
            served.append(stack)
        elif roll < 0.95 and served:
            served.pop(rng.randrange(len(served))).close()
        elif roll < 0.98 and len(lost) < 3:
            name = rng.choice([*router.replicas])
            router.lost(name)
            lost.add(name)
        elif lost:
            router.joined(lost.pop())
        assert all(replica.to_read >= 0 for replica in router.replicas.values())
        router.index.check()
        assert set(router.index.blocks_of) <= set(router.replicas)
    for stack in served:
        stack.close()
    assert all(not replica.flights for replica in router.replicas.values())


# --- coming and going ---------------------------------------------------------------------------

def test_a_lost_replica_gets_nothing_and_a_new_life_begins_empty():
    router = Router("ab", longest_prefix)
    router.index.stored("a", "pq")
    router.lost("a")
    assert router.route(ask("pq")).replica == "b"
    router.joined("a")
    assert router.index.match("pq") == {}
    router.index.stored("b", "pq")
    router.joined("b")                                  # restarted before anybody noticed
    assert router.index.match("pq") == {}
    with pytest.raises(ValueError, match="there is no replica 'c' among a, b"):
        router.lost("c")


def test_without_replicas_there_is_no_choice():
    router = Router("a", round_robin)
    router.lost("a")
    with pytest.raises(ValueError, match="no replica is left"):
        router.route(ask())


def test_with_events_the_router_notes_nothing_itself():
    router = Router("ab", longest_prefix, learns=False)
    with router.serving(ask("pq")):
        assert router.index.match("pq") == {}
