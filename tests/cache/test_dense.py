"""The dense cache: room, order of events, and what a failed step leaves behind."""

import pytest
import torch

from minimodel.cache.dense import DenseCache
from minimodel.model.batch import Batch


@pytest.fixture
def cache(make_config):
    return DenseCache(make_config(), capacity=11, num_sequences=3, dtype=torch.float64)


def step(model, cache, tokens, new):
    batch = cache.batch(new)
    with torch.inference_mode():
        logits = model(torch.tensor(tokens), batch, cache)
    cache.commit(batch)
    return logits


def test_entries_have_the_documented_shape(cache, make_config):
    assert cache.entries.shape == (4, 3, 11, make_config().entry_width)
    shared = DenseCache(make_config(kv_source_layers=(0, 1, 1, 1)), capacity=11)
    assert shared.entries.shape == (2, 1, 11, make_config().entry_width)


@pytest.mark.parametrize(("capacity", "num_sequences", "message"), [
    (0, 1, "1 sequences of 0 tokens holds nothing"), (5, 0, "0 sequences of 5 tokens"),
    (98, 1, "capacity=98 is beyond the model's context of 97 tokens")])
def test_impossible_sizes_are_refused(make_config, capacity, num_sequences, message):
    with pytest.raises(ValueError, match=message):
        DenseCache(make_config(), capacity, num_sequences)


def test_a_full_sequence_is_named_with_the_remedy(cache):
    cache.commit(cache.batch([4, 9, 1]))
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens noted and 3 new ones, over the "
                                         "cache's capacity of 11: make a larger cache"):
        cache.batch([7, 3, 1])
    assert cache.lengths == [4, 9, 1]
    cache.commit(cache.batch([7, 2, 1]))        # to the brim
    assert cache.lengths == [11, 11, 2]


@pytest.mark.parametrize("new", [[1], [1, 1], [1, 1, 1, 1]])
def test_a_step_must_name_every_sequence(cache, new):
    with pytest.raises(ValueError, match="must name all 3 sequences"):
        cache.batch(new)


def test_a_stale_step_is_refused_before_it_writes(cache, make_model):
    model = make_model()
    stale = cache.batch([2, 1, 2])
    step(model, cache, [1, 2, 3, 4], [1, 2, 1])
    noted = cache.entries.clone()
    with pytest.raises(ValueError, match=r"planned when \[0, 0, 0\] .* holds \[1, 2, 1\]"):
        model(torch.arange(5), stale, cache)
    with pytest.raises(ValueError, match="plan it again"):
        cache.commit(stale)
    assert torch.equal(cache.entries, noted)
    assert cache.lengths == [1, 2, 1]


def test_a_foreign_batch_over_the_capacity_changes_nothing(cache):
    with pytest.raises(ValueError, match="capacity of 11"):
        cache.commit(Batch(new=[12, 1, 1], past=[0, 0, 0]))
    assert cache.lengths == [0, 0, 0]
    cache.check()


def test_a_sequence_that_the_cache_does_not_have_is_refused(cache):
    with pytest.raises(ValueError, match=r"sequences=\(3,\) must name some of the cache's 3"):
        cache.commit(Batch(new=[1], sequences=[3]))
    assert cache.lengths == [0, 0, 0]


def test_a_finished_sequence_can_be_left_out_of_a_step(cache, make_model):
    model = make_model()
    step(model, cache, [1, 2, 3, 4, 5, 6], [2, 3, 1])
    noted = cache.entries[:, 1].clone()
    assert step(model, cache, [7, 8], [1, 0, 1]).shape == (2, model.config.vocab_size)
    assert cache.lengths == [3, 3, 2]
    assert torch.equal(cache.entries[:, 1], noted)


def test_another_number_type_is_refused(make_model, make_config):
    cache = DenseCache(make_config(), capacity=11)
    with pytest.raises(ValueError, match=r"float64 and the cache's torch\.float32: make the cache"):
        model = make_model()
        model(torch.arange(3), cache.batch([3]), cache)


def test_a_step_that_fails_halfway_leaves_no_trace(cache, make_model):
    model = make_model()
    step(model, cache, list(range(9)), [5, 1, 3])
    clean = DenseCache(model.config, capacity=11, num_sequences=3, dtype=torch.float64)
    step(model, clean, list(range(9)), [5, 1, 3])

    def break_down(*_):
        raise RuntimeError("power cut")
    hook = model.layers[2].mlp.register_forward_pre_hook(break_down)
    with pytest.raises(RuntimeError, match="power cut"):
        step(model, cache, [90, 91, 92, 93, 94], [1, 3, 1])
    hook.remove()
    assert cache.lengths == [5, 1, 3]
    after, expected = (step(model, c, [7, 8, 9, 10], [2, 1, 1]) for c in (cache, clean))
    assert torch.equal(after, expected)


def test_uncommitted_and_unused_memory_is_never_read(make_model):
    model = make_model()
    caches = [DenseCache(model.config, capacity=11, dtype=torch.float64) for _ in range(2)]
    caches[0].entries.fill_(float("nan"))
    for tokens in ([1, 2, 3], [4], [5, 6]):
        poisoned, clean = (step(model, cache, tokens, [len(tokens)]) for cache in caches)
        assert torch.equal(poisoned, clean)


def test_no_graph_grows_behind_the_notes(make_model):
    """A caller who forgets inference_mode gets slow steps, not ever more memory."""
    model = make_model()
    cache = DenseCache(model.config, capacity=11, dtype=torch.float64)
    batch = cache.batch([3])
    assert model(torch.arange(3), batch, cache).requires_grad
    assert not cache.entries.requires_grad


def test_stats_count_what_is_set_aside_and_what_is_used(cache):
    one_token = 4 * 56 * 8      # layers, entry width, bytes
    assert cache.stats() == {"reserved_bytes": 33 * one_token, "used_bytes": 0}
    cache.commit(cache.batch([4, 9, 1]))
    assert cache.stats() == {"reserved_bytes": 33 * one_token, "used_bytes": 14 * one_token}


@pytest.mark.parametrize("lengths", [[12, 0, 0], [0, -1, 0]])
def test_check_finds_a_length_outside_the_memory(cache, lengths):
    cache.check()
    cache.lengths = lengths
    with pytest.raises(AssertionError, match="capacity of 11"):
        cache.check()


def test_the_lengths_given_to_a_batch_are_a_copy(cache):
    batch = cache.batch([1, 1, 1])
    cache.commit(batch)
    assert batch.past == (0, 0, 0)
