"""The template: the turns that the toy was trained on."""

import random

from minimodel.model.corpus import dialogue_document
from minimodel.serve.chat import conversation
from minimodel.tokenizer import (
    ASSISTANT,
    START,
    SYSTEM,
    TOOL,
    TURN,
    USER,
    decode,
    encode,
)

ROLES = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant", TOOL: "tool"}


def turns_of(ids):
    """The (role, text) turns of a dialogue of the corpus."""
    turns, first = [], 1
    while first < len(ids):
        last = ids.index(TURN, first)
        turns.append((ROLES[ids[first]], decode(ids[first + 1:last])))
        first = last + 1
    return turns


def test_the_turns_are_those_of_the_corpus():
    seen = set()
    for seed in range(12):
        ids = dialogue_document(random.Random(seed), 900).ids
        turns = turns_of(ids)
        seen |= {role for role, _ in turns}
        assert conversation(turns) == [*ids, ASSISTANT]
    assert seen == {"system", "user", "assistant", "tool"}


def test_a_turn_is_its_bytes_between_marks():
    assert conversation([("developer", "Hi"), ("user", "é<|turn|>")]) == [
        START, SYSTEM, *b"Hi", TURN, USER, *"é<|turn|>".encode(), TURN, ASSISTANT]


def test_what_was_generated_and_what_is_sent_back_are_the_same_ids():
    first = [("user", "Who are you?")]
    written = [*encode("I am Bo.", start=False), TURN]
    again = conversation([*first, ("assistant", "I am Bo."), ("user", "Who?")])
    assert again[:len(conversation(first)) + len(written)] == [*conversation(first), *written]
