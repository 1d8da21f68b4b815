"""The texts: well-formed, answerable from themselves, the same everywhere, never the test's own."""

import os
import re
import subprocess
import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.model import corpus
from minimodel.model.corpus import DOMAINS, VALUE, Notebook, draw_facts, landmarks, town_notebook
from minimodel.tokenizer import END, START, TURN, decode, encode

SEEDS = st.integers(0, 10**6)
WITH_VALUES = ("notebook", "dialogue", "records")


@pytest.mark.parametrize("domain", DOMAINS)
@given(SEEDS, st.integers(64, 700))
def test_a_document_is_ids_with_a_weight_each(domain, seed, length):
    doc = DOMAINS[domain](Random(seed), length)
    assert doc.ids[0] == START
    assert doc.weights[0] == 0.0
    assert len(doc.ids) == len(doc.weights) == len(doc) > 1
    assert all(0 <= token < 264 for token in doc.ids)
    assert all(0 <= weight <= VALUE for weight in doc.weights)
    assert max(doc.weights) > 0
    assert max(token for token in doc.ids if token < 256) < 128      # plain ASCII


@pytest.mark.parametrize("domain", DOMAINS)
@given(SEEDS, st.integers(64, 700))
def test_values_stand_where_they_are_said_to_and_weigh_most(domain, seed, length):
    doc = DOMAINS[domain](Random(seed), length)
    assert bool(doc.values) == (domain in WITH_VALUES)
    heavy = {i for i, weight in enumerate(doc.weights) if weight == VALUE}
    assert heavy == {i for first, size in doc.values for i in range(first, first + size)}
    for first, size in doc.values:
        value = decode(doc.ids[first:first + size])
        assert len(value) == size
        assert re.fullmatch(r"\d{4}|\d{3}-\d{3}|[A-Z][a-z]+", value)


@pytest.mark.parametrize("domain", WITH_VALUES)
@given(SEEDS)
def test_every_answer_stands_above_its_question(domain, seed):
    """The line of the answer, value and all, is in the text before: reading it is enough."""
    doc = DOMAINS[domain](Random(seed), 400)
    for first, size in doc.values:
        above, value = decode(doc.ids[:first]), decode(doc.ids[first:first + size])
        if domain == "records":
            who = above.rsplit('get("', 1)[1].split('"')[0]
            assert f'{{"name": "{who}", "id": {value}}}' in above
            continue
        opening = "The " + above.rsplit("The ", 1)[1]
        assert f"\n{opening}{value}.\n" in above.replace("<|turn|>", "\n")
        end = TURN if domain == "dialogue" else END
        assert doc.ids[first + size:first + size + 2] == [ord("."), end]


@given(SEEDS, st.integers(33, 600), st.sampled_from([1.0, 0.5]))
def test_a_training_row_has_exactly_the_length_asked_for(seed, length, share):
    row = corpus.training_row(Random(seed), length, {"notebook": share, "echo": 1.0, "sums": 0.2})
    assert len(row.ids) == len(row.weights) == length + 1
    heavy = {i for i, weight in enumerate(row.weights) if weight == VALUE}
    kept = {i for first, size in row.values for i in range(first, first + size)}
    assert kept <= heavy
    cut_off = heavy - kept                          # a value that the row's end cuts through
    assert all(i > length - 7 for i in cut_off)


# --- town notebooks ------------------------------------------------------------------------


@given(SEEDS, st.integers(500, 2000), st.integers(1, 8))
def test_a_notebook_with_stories_keeps_its_size_and_its_keys_apart(seed, num_bytes, num_facts):
    notebook = town_notebook(Random(seed), num_bytes, num_facts)
    assert num_bytes - 80 < len(notebook.text.encode()) <= num_bytes
    assert len(notebook.facts) == num_facts
    marks = [mark for fact in notebook.facts for mark in landmarks(fact)]
    assert len(marks) == len(set(marks))
    places = [notebook.lines.index(fact.line) for fact in notebook.facts]
    assert places == sorted(places)


@given(SEEDS, st.integers(60, 3000))
def test_a_dense_notebook_is_facts_only_and_keeps_its_size(seed, num_bytes):
    notebook = town_notebook(Random(seed), num_bytes)
    assert len(notebook.text.encode()) <= num_bytes
    assert notebook.lines == tuple(fact.line for fact in notebook.facts)
    assert len({(fact.kind, fact.key) for fact in notebook.facts}) == len(notebook.facts) >= 1
    if num_bytes > 500:
        assert len(notebook.text) > 0.85 * num_bytes


@given(SEEDS)
def test_value_span_points_at_the_value_s_tokens(seed):
    notebook = town_notebook(Random(seed), 700, 6)
    ids = encode(notebook.text)
    for fact in notebook.facts:
        span = notebook.value_span(fact)
        assert decode(ids[span.start:span.stop]) == fact.value
        assert decode(ids[:span.start]).endswith(fact.opening)
        assert len(set(span)) == len(fact.value)


def test_a_prompt_asks_below_the_notebook():
    notebook = town_notebook(Random(1), 300, 2)
    for fact in notebook.facts:
        assert notebook.ask(fact) == notebook.text + fact.question
        assert re.fullmatch(r"Q: (Who|What) is the (code|owner|phone) of .+\?\n", fact.question)
        assert fact.answer == f"A: {fact.line.rstrip()}"


def test_the_span_of_a_foreign_fact_is_refused():
    with pytest.raises(ValueError, match="not found"):
        Notebook(lines=("One line.\n",), facts=()).value_span(draw_facts(Random(1), 1)[0])


@pytest.mark.parametrize(("num_bytes", "num_facts", "message"), [
    (60, 5, r"5 facts do not fit into 60 bytes: allow \d+ or ask for fewer"),
    (60_000, 1100, "could not draw 1100 facts with distinct keys: ask for fewer"),
    (500, 0, "cannot draw 0 facts: ask for at least 1"),
    (500, -3, "cannot draw -3 facts"),
    (20, None, "no fact fits into 20 bytes: allow at least 60"),
    (-5, None, "no fact fits into -5 bytes")])
def test_an_impossible_notebook_is_refused(num_bytes, num_facts, message):
    with pytest.raises(ValueError, match=message):
        town_notebook(Random(3), num_bytes, num_facts)


def test_the_number_of_bytes_named_in_the_refusal_is_enough():
    with pytest.raises(ValueError) as error:
        town_notebook(Random(3), 60, 5)
    enough = int(re.search(r"allow (\d+)", str(error.value))[1])
    assert len(town_notebook(Random(3), enough, 5).text) == enough


@given(SEEDS, st.integers(1, 8))
def test_exactly_as_many_facts_are_drawn(seed, count):
    assert len(draw_facts(Random(seed), count, distinct=True)) == count


# --- the same everywhere, and apart from what is measured -------------------------------------

DIGEST = """
import hashlib
from random import Random
from minimodel.model import corpus
rows = [corpus.training_row(Random(f"0/{i}"), 130, dict.fromkeys(corpus.DOMAINS, 1.0))
        for i in range(24)]
texts = [corpus.town_notebook(Random(i), 600, 8).text for i in range(9)]
print(hashlib.sha256(repr((rows, texts)).encode()).hexdigest())
"""


def test_a_seed_gives_the_same_text_in_every_process():
    """Nothing may hang on the order of a set: Python shuffles it from process to process."""
    digests = {subprocess.run([sys.executable, "-c", DIGEST], text=True, check=True,
                              capture_output=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout
               for seed in ("0", "1", "77")}
    assert len(digests) == 1


def test_texts_are_made_without_torch():
    code = "import sys, minimodel.model.corpus; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True).stdout == "False\n"


def test_no_text_is_measured_that_was_trained_on(monkeypatch):
    """Seeds of training are "SEED/STEP"; those of the recall benchmark can never equal one."""
    from minimodel.engine import recall
    from minimodel.model import train
    seeds = {"train": set(), "recall": set()}
    plain = Random

    def listening(where):
        return lambda seed: (seeds[where].add(seed), plain(seed))[1]
    monkeypatch.setattr(recall.random, "Random", listening("recall"))
    for kind in ("story", "dense", "zeroed"):
        list(recall.questions(kind, 3, seed=0))
    monkeypatch.setattr(train.random, "Random", listening("train"))
    for step in range(3):
        train.draw_rows(train.SMALL, step)
    assert seeds["train"] == {"0/0", "0/1", "0/2"}
    assert len(seeds["recall"]) >= 9
    assert all(seed.startswith("recall/") for seed in seeds["recall"])
