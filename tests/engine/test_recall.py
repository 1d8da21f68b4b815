"""Recall: what is asked, how it is counted, and that the shipped toy keeps what its card says."""

import pytest

from minimodel.engine.recall import Recall, ask, measure, questions
from minimodel.model import checkpoint


def test_an_interval_by_hand():
    """Wilson's interval for 8 of 10, from the closed form: 0.490 to 0.943."""
    low, high = Recall("story", asked=10, right=8).interval()
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)


@pytest.mark.parametrize("right", [0, 7])
def test_an_interval_stays_a_share(right):
    low, high = Recall("dense", asked=7, right=right).interval()
    assert 0 <= low <= right / 7 <= high <= 1


@pytest.mark.parametrize("kind", ["story", "dense", "zeroed"])
def test_questions_are_of_their_kind(kind):
    drawn = list(questions(kind, 9, seed=1))
    assert len(drawn) == 9
    assert len({notebook.text for notebook, _ in drawn}) == 9
    for notebook, fact in drawn:
        assert fact in notebook.facts
        assert len(notebook.text) <= (512 if kind == "dense" else 1500)
        assert kind == "dense" or len(notebook.facts) == 8
        assert kind != "zeroed" or fact.kind in ("code", "phone")


def test_bad_kinds_and_counts_are_named(make_model):
    with pytest.raises(ValueError, match="'stories' is none of story"):
        next(questions("stories", 1, seed=1))
    with pytest.raises(ValueError, match="count=0"):
        measure(None, "story", 0, seed=1)


@pytest.fixture(scope="module")
def toy():
    return checkpoint.load()


# The model card has the measured shares, over a thousand notebooks. Forty are enough to tell the
# trained toy from a broken one; the bars leave room for near ties that another processor flips.


def test_the_toy_recalls_facts_among_stories(toy):
    assert measure(toy, "story", 40, seed=11).right >= 32


def test_the_toy_recalls_facts_from_a_dense_list(toy):
    assert measure(toy, "dense", 40, seed=11).right >= 30


def test_no_digit_fact_survives_the_loss_of_its_entries(toy):
    """The answers come from the notes: without the value's own entries none is right."""
    for notebook, fact in questions("zeroed", 12, seed=11):
        assert fact.value not in ask(toy, notebook, fact, zeroed=True)
