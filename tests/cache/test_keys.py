"""Block keys: equal only where everything up to the block's end is equal, everywhere and always."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimodel.cache.keys import KEY_BYTES, chain, fingerprint, most_hits, next_key, root_key
from minimodel.config import ModelConfig

WEIGHTS = "5e" * 32
MODEL = fingerprint(ModelConfig(), WEIGHTS, 16, "float32 little")
ROOT = root_key(MODEL)
TOKENS = list(range(3, 50))             # 47 tokens: of 7 each, 6 blocks and 5 tokens more


# --- chains -------------------------------------------------------------------------------------

def test_a_chain_has_a_key_for_each_full_block():
    keys = chain(ROOT, TOKENS, 7)
    assert len(keys) == len(set(keys)) == 6
    assert {len(key) for key in (ROOT, *keys)} == {KEY_BYTES}
    assert [len(chain(ROOT, TOKENS[:n], 7)) for n in (0, 6, 7, 8, 13, 14)] == [0, 0, 1, 1, 1, 2]


def test_a_longer_text_keeps_the_keys_of_its_beginning():
    assert chain(ROOT, TOKENS[:24], 7) == chain(ROOT, TOKENS, 7)[:3]
    keys = chain(ROOT, TOKENS[:14], 7)
    assert next_key(keys[-1], TOKENS[14:21]) == chain(ROOT, TOKENS, 7)[2]


def test_keys_are_sha256_of_all_that_came_before():
    """The slow way: each key by hashlib alone, from its definition."""
    key = hashlib.sha256(b"second-send" + bytes.fromhex(MODEL) + bytes(8)).digest()
    assert key == ROOT
    for place, found in enumerate(chain(ROOT, TOKENS, 7)):
        numbers = b"".join(token.to_bytes(4, "little") for token in TOKENS[7 * place:7 * place + 7])
        key = hashlib.sha256(key + numbers).digest()
        assert found == key


@pytest.mark.parametrize("place", range(42))
def test_g01_one_other_token_changes_its_block_s_key_and_all_after_it(place):
    """Two token runs with one hash: another prompt's notes are used, and nothing shows it."""
    other = list(TOKENS)
    other[place] += 1
    same = [a == b for a, b in zip(chain(ROOT, TOKENS, 7), chain(ROOT, other, 7), strict=True)]
    assert same == [block < place // 7 for block in range(6)]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6), st.lists(st.integers(0, 2**32 - 1),
                                                                 max_size=6))
def test_g01_two_blocks_have_one_key_only_if_they_are_one(first, second):
    assert (next_key(ROOT, first) == next_key(ROOT, second)) == (first == second)


@pytest.mark.parametrize(("first", "second"), [
    ([1, 0], [1]), ([1, 256], [257, 0]), ([0, 1], [2**24]), ([258], [2, 1]), ([], [0])])
def test_g01_no_token_s_bytes_pass_for_another_s(first, second):
    assert next_key(ROOT, first) != next_key(ROOT, second)


def test_g01_equal_blocks_after_different_beginnings_have_different_keys():
    first, second = chain(ROOT, [1, 9, 9, 9], 2), chain(ROOT, [2, 9, 9, 9], 2)
    assert not set(first) & set(second)
    repeated = chain(ROOT, [9] * 12, 2)
    assert len(set(repeated)) == 6


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_number_that_is_no_token_has_no_key(token):
    with pytest.raises(struct.error):
        next_key(ROOT, [5, token])


PROCESS = """
import json, sys
from minimodel.cache.keys import chain, fingerprint, root_key
from minimodel.config import ModelConfig
model = fingerprint(ModelConfig(), sys.argv[1], 16, "float32 little")
root = root_key(model, b"a tenant")
print(json.dumps([hash("seed"), model, [key.hex() for key in chain(root, range(3, 50), 7)]]))
"""


def test_g02_g04_another_process_makes_the_same_keys():
    """Seeds that differ by process: no hits after a restart. Known seeds: collisions on purpose."""
    answers = [json.loads(subprocess.run(
        [sys.executable, "-c", PROCESS, WEIGHTS], env={**os.environ, "PYTHONHASHSEED": seed},
        check=True, capture_output=True, text=True).stdout) for seed in ("1", "2", "random")]
    seeds, models, keys = zip(*answers, strict=True)
    assert len(set(seeds)) == 3                 # Python's own hashes do differ
    assert set(models) == {MODEL}
    here = [key.hex() for key in chain(root_key(MODEL, b"a tenant"), TOKENS, 7)]
    assert all(found == here for found in keys)


# --- how many may be found ----------------------------------------------------------------------

def test_g06_one_token_is_always_left_to_compute():
    """A prompt of whole blocks, all cached: no token to run, and the kernel fails."""
    for num_tokens in range(1, 100):
        for block_size in (1, 3, 16):
            left = num_tokens - most_hits(num_tokens, block_size) * block_size
            assert 1 <= left <= block_size
    assert most_hits(0, 16) == 0


def test_g07_whole_blocks_are_found_and_never_a_part_of_the_last():
    """A full hit less one token: the count is no longer whole blocks, and the chain is broken."""
    assert [most_hits(n, 16) for n in (1, 16, 17, 32, 33, 16 * 7, 16 * 7 + 1)] == [0, 0, 1, 1, 2,
                                                                                  6, 7]


# --- tenants and texts --------------------------------------------------------------------------

@pytest.mark.parametrize(("one", "other"), [
    (b"", b"\0"), (b"a", b"b"), (b"a", b"a\0"), (b"", bytes(8)), (b"key", b"Key")])
def test_g26_tenants_with_different_salts_share_no_key(one, other):
    """A tenant guesses another's prompt by the time to its first token."""
    first, second = (chain(root_key(MODEL, salt), TOKENS, 7) for salt in (one, other))
    assert not set(first) & set(second)
    assert first == chain(root_key(MODEL, one), TOKENS, 7)


def test_g26_no_salt_passes_for_the_end_of_a_fingerprint():
    longer = MODEL + "61"
    assert root_key(longer) != root_key(MODEL, b"a")


def test_g27_what_the_engine_wrote_is_found_by_its_ids():
    """An answer is encoded again from its text, other than it was written: no turn ever hits."""
    prompt, answer = TOKENS[:16], [101, 102, 103, 104, 105]
    kept = chain(ROOT, prompt + answer, 7)
    next_turn = chain(ROOT, [*prompt, *answer, 7, 7, 7, 7, 7, 7, 7], 7)
    assert next_turn[:3] == kept
    again = [*prompt, 101, 102, 199, 105]       # the same text in other pieces
    assert chain(ROOT, again + [7] * 8, 7)[:3] != kept
    assert chain(ROOT, again + [7] * 8, 7)[:2] == kept[:2]


def test_g28_a_clock_at_the_head_of_a_prompt_leaves_nothing_to_find():
    """Volatile text first: nothing of a long system prompt is ever found."""
    noon, later = [12, 0, 5], [12, 1, 9]
    first, second = chain(ROOT, noon + TOKENS, 7), chain(ROOT, later + TOKENS, 7)
    assert not set(first) & set(second)
    first, second = chain(ROOT, TOKENS + noon, 7), chain(ROOT, TOKENS + later, 7)
    assert first[:6] == second[:6]


# --- fingerprints -------------------------------------------------------------------------------

def changed(name):
    """A configuration of which one size is another."""
    latent = {"latent_size": 24, "nope_dim": 8, "rope_dim": 4, "num_kv_heads": 8}
    others = {"num_heads": {"num_heads": 4}, "num_kv_heads": {"num_kv_heads": 4}, **{
        name: {**latent, name: 2 * latent[name]} for name in ("latent_size", "nope_dim",
                                                              "rope_dim")},
        "kv_source_layers": {"kv_source_layers": (0, 0, 2, 3)}}
    value = getattr(ModelConfig(), name)
    return ModelConfig(**others.get(name, {name: 2 * value}))


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_g25_g36_each_size_of_the_model_is_in_the_fingerprint(name):
    config = changed(name)
    assert getattr(config, name) != getattr(ModelConfig(), name)
    assert fingerprint(config, WEIGHTS, 16, "float32 little") != MODEL


def test_g36_other_weights_block_sizes_and_number_types_are_other_models():
    """Other weights under the same name, in the same folder: foreign notes are loaded."""
    others = [fingerprint(ModelConfig(), *rest) for rest in (
        ("5f" * 32, 16, "float32 little"), (WEIGHTS, 32, "float32 little"),
        (WEIGHTS, 16, "bfloat16 little"), (WEIGHTS, 16, "float32 big"))]
    assert len({MODEL, *others}) == 5
    keys = [chain(root_key(model), TOKENS, 7) for model in (MODEL, *others)]
    assert len({key for found in keys for key in found}) == 30


def test_equal_configurations_have_equal_fingerprints():
    """A file may say 1000000 where the code says 1000000.0."""
    same = ModelConfig(rope_theta=1_000_000, expert_scale=1, kv_source_layers=[])
    assert same == ModelConfig()
    assert fingerprint(same, WEIGHTS, 16, "float32 little") == MODEL


def test_a_fingerprint_is_64_hexadecimal_digits():
    assert len(bytes.fromhex(MODEL)) == KEY_BYTES
    assert MODEL.lower() == MODEL


def test_what_makes_no_keys_is_refused():
    with pytest.raises(TypeError, match="salt='ann' must be bytes: encode a text first"):
        root_key(MODEL, "ann")
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        chain(root_key(MODEL), TOKENS, 0)
