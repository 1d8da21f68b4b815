"""Bytes and ids: nothing is lost, nothing forged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel import tokenizer
from minimodel.tokenizer import SPECIAL_TOKENS, START, STOP_IDS, decode, decode_bytes, encode


def test_every_byte_is_its_own_id():
    everything = bytes(range(256))
    assert encode(everything, start=False) == list(range(256))
    assert decode_bytes(range(256)) == everything


@given(st.binary())
def test_bytes_round_trip(data):
    assert encode(data)[0] == START
    assert decode_bytes(encode(data)) == data


@given(st.text())
def test_text_round_trips(text):
    ids = encode(text, start=False)
    assert len(ids) == len(text.encode())
    assert decode(ids) == text


def test_special_tokens_stand_above_the_bytes_and_leave_nothing():
    names = ("PAD", "START", "END", "SYSTEM", "USER", "ASSISTANT", "TOOL", "TURN")
    assert [getattr(tokenizer, name) for name in names] == list(range(256, tokenizer.VOCAB_SIZE))
    assert [f"<|{name.lower()}|>" for name in names] == list(SPECIAL_TOKENS)
    assert decode_bytes(range(256, tokenizer.VOCAB_SIZE)) == b""
    assert {tokenizer.END, tokenizer.TURN} == STOP_IDS


@pytest.mark.parametrize("mark", SPECIAL_TOKENS)
def test_a_prompt_cannot_forge_a_special_token(mark):
    assert max(encode(f"before {mark} after", start=False)) < 256


@pytest.mark.parametrize("token", [-1, 264, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=rf"token id {token} .*0 to 263"):
        decode_bytes([65, token])


@pytest.mark.parametrize("wrong", [5, [1, 2], None, 2.5])
def test_only_text_and_bytes_are_encoded(wrong):
    with pytest.raises(TypeError):
        encode(wrong)


def test_bytes_that_are_no_utf8_survive_as_bytes_and_show_as_marks():
    data = b"caf\xe9 \xff\x00\r\n"
    assert decode_bytes(encode(data)) == data
    assert decode(encode(data)) == "caf� �\x00\r\n"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_will_do(kind):
    assert encode(kind(b"ab")) == [START, 97, 98]
