"""Requests as JSON: what is taken, what is let pass, what is refused, each by its name."""

import json

import pytest

from minimodel.engine.request import Sampling
from minimodel.pricing import Usage
from minimodel.serve.errors import ApiError
from minimodel.serve.messages import ChatBody, CompletionBody, parse, usage_fields
from minimodel.tokenizer import ASSISTANT, START, TURN, USER

COMPLETION = {"model": "m", "prompt": "Hé"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hé"}]}


def completion(**more):
    return parse(CompletionBody, json.dumps(COMPLETION | more).encode())


def chat(**more):
    return parse(ChatBody, json.dumps(CHAT | more).encode())


# --- what is taken -----------------------------------------------------------------------------


def test_a_text_begins_with_the_start_token_and_ids_are_taken_as_they_are():
    assert completion().tokens() == [START, *"Hé".encode()]
    assert completion(prompt=[7, 263, 0]).tokens() == [7, 263, 0]
    assert chat().tokens() == [START, USER, *"Hé".encode(), TURN, ASSISTANT]


def test_parts_of_a_message_are_put_together():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "é"}]
    assert chat(messages=[{"role": "user", "content": parts}]).tokens() == chat().tokens()


def test_how_tokens_are_chosen_is_as_asked():
    body = completion(max_tokens=9, temperature=0.5, top_p=0.25, seed=-3)
    assert body.sampling(room=2) == Sampling(9, 0.5, top_p=0.25, seed=-3)


def test_unless_asked_otherwise_it_is_greedy_and_as_long_as_there_is_room():
    assert completion().sampling(room=1_000).temperature == 0
    assert [completion().sampling(room).max_tokens for room in (-5, 1, 10, 1_000)] == [1, 1, 10, 64]


def test_without_a_seed_chance_decides():
    assert len({completion(temperature=1).sampling(9).seed for _ in range(5)}) == 5


def test_the_chat_s_own_limit_comes_first():
    assert chat(max_tokens=5).sampling(99).max_tokens == 5
    assert chat(max_completion_tokens=6).sampling(99).max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).sampling(99).max_tokens == 6


@pytest.mark.parametrize(("stop", "stops"), [
    (None, []), ("x", ["x"]), (["x", "yz"], ["x", "yz"]), ([], [])])
def test_stop_strings(stop, stops):
    assert completion(stop=stop).stop == stops


@pytest.mark.parametrize("more", [
    {"user": "ann"}, {"metadata": {"a": 1}}, {"frequency_penalty": 0}, {"presence_penalty": 0.0},
    {"logprobs": None}, {"logprobs": False}, {"echo": False}, {"best_of": 1}, {"logit_bias": {}},
    {"suffix": None}, {"anything": None}, {"response_format": {"type": "text"}}])
def test_what_asks_for_nothing_is_let_pass(more):
    assert completion(**more) == completion()
    assert chat(**more) == chat()


def test_a_message_that_comes_back_with_empty_fields_is_let_pass():
    turn = {"role": "user", "content": "Hé", "tool_calls": None, "refusal": None, "name": "ann"}
    assert chat(messages=[turn]) == chat()


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "param", "message"), [
    ({"prompt": ""}, "prompt", 'prompt="": is empty: give at least one byte'),
    ({"prompt": []}, "prompt", r"prompt=\[\]: is empty"),
    ({"prompt": 7}, "prompt", "prompt=7: must be one text, or a list of token ids from 0 to 263"),
    ({"prompt": ["a", "b"]}, "prompt", "send one request for each prompt"),
    ({"prompt": [1, 264]}, "prompt", "token ids from 0 to 263"),
    ({"prompt": [1, -1]}, "prompt", "token ids from 0 to 263"),
    ({"prompt": [True]}, "prompt", "token ids from 0 to 263"),
    ({"prompt": [10**30]}, "prompt", "token ids from 0 to 263"),
    ({"model": 3}, "model", "model=3: Input should be a valid string"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0: .* greater than or equal to 1"),
    ({"max_tokens": "9"}, "max_tokens", 'max_tokens="9": .* valid integer'),
    ({"max_tokens": 2.5}, "max_tokens", "max_tokens=2.5: .* valid integer"),
    ({"max_tokens": True}, "max_tokens", "max_tokens=true: .* valid integer"),
    ({"temperature": -1}, "temperature", "temperature=-1: .* greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature", "temperature=2.5: .* less than or equal to 2"),
    ({"temperature": float("nan")}, "temperature", "temperature=NaN: .* finite"),
    ({"top_p": 0}, "top_p", "top_p=0: .* greater than 0"),
    ({"top_p": 1.5}, "top_p", "top_p=1.5: .* less than or equal to 1"),
    ({"seed": 2**63}, "seed", "seed=9223372036854775808: .* less than"),
    ({"n": 0}, "n", "n=0: .* greater than or equal to 1"),
    ({"n": 129}, "n", "n=129: .* less than or equal to 128"),
    ({"stop": ["a"] * 5}, "stop", "stop=.*: .* at most 4 items"),
    ({"stop": ["a", ""]}, "stop.1", 'stop.1="": .* at least 1 character'),
    ({"stop": 7}, "stop", "stop=7: .* valid (list|array)"),
    ({"stream": "yes"}, "stream", 'stream="yes": .* valid boolean'),
    ({"stream_options": {"include_usage": True}}, None, "stream_options belong to a stream: set"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "is not supported")])
def test_a_value_that_cannot_be_is_refused_by_its_name(more, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        completion(**more)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(("name", "value"), [
    ("frequency_penalty", 0.5), ("logprobs", 0), ("logprobs", True), ("echo", True),
    ("best_of", 2), ("logit_bias", {"7": 1}), ("tools", [{}]), ("cache_salt", "ann"),
    ("response_format", {"type": "json_object"}), ("prompt_cache_key", "k"), ("foo", 0)])
def test_what_is_unknown_or_cannot_be_done_is_refused_by_its_name(name, value):
    for ask in (completion, chat):
        with pytest.raises(ApiError, match=f"^{name} is not supported by this server, which takes "
                                           "model, max_tokens, .*: leave it out$") as refused:
            ask(**{name: value})
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(("messages", "param", "message"), [
    ([], "messages", r"messages=\[\]: List should have at least 1 item"),
    ("Hi", "messages", "valid (list|array)"),
    (["Hi"], "messages.0", 'messages.0="Hi": '),
    ([{"role": "user"}], "messages.0.content", "messages.0.content is missing"),
    ([{"content": "Hi"}], "messages.0.role", "messages.0.role is missing: it is required"),
    ([{"role": "judge", "content": "Hi"}], "messages.0.role", "messages.0.role=.judge.: .*'tool'"),
    ([{"role": "user", "content": 7}], "messages.0.content", "valid string"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
     "messages.0.content", "has a part that is no text, and this model reads text only"),
    ([{"role": "user", "content": ["Hi"]}], "messages.0.content", "valid string"),
    ([{"role": "user", "content": "Hi", "tool_calls": [1]}], "messages.0.tool_calls",
     "messages.0.tool_calls is not supported by this server: leave it out")])
def test_messages_that_are_none(messages, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        chat(messages=messages)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("raw", [b"", b"{", b"{'model': 1}", b"\xff\xfe", b'{"model": "\\ud800"}',
                                 b"[" * 20_000, b'{"model": "m", "prompt": "x"} {}'])
def test_what_is_no_json(raw):
    with pytest.raises(ApiError, match=r"the body is no JSON .*: send a JSON object") as refused:
        parse(CompletionBody, raw)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("raw", [b"[]", b"7", b'"x"', b"null"])
def test_json_that_is_no_object(raw):
    with pytest.raises(ApiError, match=r"valid dictionary|object") as refused:
        parse(CompletionBody, raw)
    assert refused.value.status == 400


def test_what_is_missing_is_named():
    with pytest.raises(ApiError, match=r"^model is missing: it is required$"):
        parse(CompletionBody, b"{}")
    with pytest.raises(ApiError, match=r"^prompt is missing"):
        parse(CompletionBody, b'{"model": "m"}')


def test_a_long_value_is_not_sent_back_whole():
    with pytest.raises(ApiError) as refused:
        completion(max_tokens="9" * 1_000)
    assert len(refused.value.message) < 150


# --- usage -------------------------------------------------------------------------------------


def test_a_usage_is_read_back_from_its_fields():
    fields = usage_fields(Usage(48, 17, 5, disk_hit_tokens=32))
    assert fields == {
        "prompt_tokens": 65, "completion_tokens": 5, "total_tokens": 70,
        "prompt_cache_hit_tokens": 48, "prompt_cache_miss_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 48}, "prompt_cache_disk_hit_tokens": 32}
    assert Usage.from_api(fields) == Usage(48, 17, 5)
