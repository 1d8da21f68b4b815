"""Requests: when an answer ends, and which ones cannot be served."""

import pytest
import torch

from minimodel.engine import generate
from minimodel.tokenizer import END, STOP_IDS, TURN

GENERATE = [generate.generate_without_cache, generate.generate_with_cache]
STREAM = [generate.stream_without_cache, generate.stream_with_cache]


@pytest.fixture
def model(make_model):
    """Its greedy answer to PROMPT has no token twice in the first few, so stops can be placed."""
    return make_model(seed=5, dtype=torch.float32)


PROMPT = [40, 3, 200, 7, 7]


@pytest.mark.parametrize("write", GENERATE)
def test_max_tokens_bounds_the_answer(model, write):
    answer = write(model, PROMPT, 6, stop_ids=())
    assert len(answer) == 6
    assert write(model, PROMPT, 1, stop_ids=()) == answer[:1]


@pytest.mark.parametrize("write", GENERATE)
def test_a_stop_token_ends_the_answer_and_belongs_to_it(model, write):
    answer = write(model, PROMPT, 6, stop_ids=())
    for stop in answer:
        assert write(model, PROMPT, 6, stop_ids={stop}) == answer[:answer.index(stop) + 1]


@pytest.mark.parametrize("write", GENERATE)
@pytest.mark.parametrize("stop", [END, TURN])
def test_the_end_marks_stop_an_answer_by_default(model, write, stop):
    """The third token of the answer and the mark change places in the model's vocabulary."""
    first, second, third, *_ = write(model, PROMPT, 6, stop_ids=())
    assert third not in {first, second, *PROMPT}
    with torch.no_grad():
        for weight in (model.embed_tokens.weight, model.lm_head.weight):
            weight[[third, stop]] = weight[[stop, third]]
    assert write(model, PROMPT, 6) == [first, second, stop]
    assert {END, TURN} == STOP_IDS


@pytest.mark.parametrize("write", GENERATE)
def test_a_request_may_fill_the_context_exactly(model, write):
    prompt = [i % 256 for i in range(95)]
    assert len(write(model, prompt, 2, stop_ids=())) == 2


@pytest.mark.parametrize("write", STREAM)
@pytest.mark.parametrize(("prompt", "max_tokens", "message"), [
    ([], 5, "the prompt is empty: give at least one token"),
    ([1, 2], 0, "max_tokens=0 must be at least 1"),
    ([1, 2], -3, "max_tokens=-3 must be at least 1"),
    ([1] * 95, 3, "prompt of 95 tokens .* 3 new ones need 98 positions, over .* context of 97: "
                  "shorten the prompt or lower max_tokens"),
    ([1, 271], 5, "token id 271 is outside the vocabulary of 271: make prompts with"),
    ([-1, 2], 5, "token id -1 is outside the vocabulary"),
])
def test_an_impossible_request_is_refused_at_once(model, write, prompt, max_tokens, message):
    """By the call itself, not by the first token."""
    with pytest.raises(ValueError, match=message):
        write(model, prompt, max_tokens)


@pytest.mark.parametrize("write", STREAM)
def test_a_prompt_of_one_token_and_prompts_as_tensors_are_served(model, write):
    assert len(list(write(model, [7], 3, stop_ids=()))) == 3
    as_tensor = list(write(model, torch.tensor(PROMPT), 3, stop_ids=()))
    assert as_tensor == list(write(model, PROMPT, 3, stop_ids=()))


def test_a_decode_computes_one_row_and_the_last_token_is_not_computed(model):
    """The cache's whole point: rows computed are prompt, then one a token, and none to spare."""
    rows = []
    model.register_forward_pre_hook(lambda _, arguments: rows.append(len(arguments[0])))
    generate.generate_with_cache(model, PROMPT, 4, stop_ids=())
    assert rows == [5, 1, 1, 1]
    rows.clear()
    generate.generate_without_cache(model, PROMPT, 4, stop_ids=())
    assert rows == [5, 6, 7, 8]


def test_two_streams_of_one_model_do_not_disturb_each_other(model):
    alone = [generate.generate_with_cache(model, prompt, 5, stop_ids=())
             for prompt in (PROMPT, PROMPT[::-1])]
    streams = [generate.stream_with_cache(model, prompt, 5, stop_ids=())
               for prompt in (PROMPT, PROMPT[::-1])]
    assert [list(answer) for answer in zip(*zip(*streams, strict=True), strict=True)] == alone
