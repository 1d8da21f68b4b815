"""What the checks of several chapters share: the odd model, and reading answers."""

import pytest
import torch

from minimodel.lesson.exercises.common import (
    ODD,
    CountingModel,
    first_difference,
    odd_model,
    pair_in,
    random_numbers,
    random_tokens,
    tensor_in,
)
from minimodel.lesson.exercises.engine import NotAnAnswer
from minimodel.model.batch import Batch


def test_no_two_sizes_of_the_odd_model_agree():
    sizes = (ODD.hidden_size, ODD.num_heads * ODD.head_dim, ODD.num_kv_heads * ODD.head_dim,
             ODD.num_layers, ODD.num_heads, ODD.num_kv_heads, ODD.head_dim, ODD.dense_size,
             ODD.num_experts, ODD.expert_size, ODD.vocab_size)
    assert len(set(sizes)) == len(sizes)


def test_contrast_sharpens_the_choice_and_leaves_its_order():
    tokens, batch = torch.tensor(random_tokens(7, seed=1)), Batch(new=[7])
    with torch.inference_mode():
        plain, sharp = (odd_model(3, contrast=c)(tokens, batch) for c in (1, 30))
    torch.testing.assert_close(sharp, 30 * plain, rtol=1e-4, atol=1e-5)
    assert plain.dtype == torch.float64


def test_made_up_inputs_are_the_same_every_time():
    assert torch.equal(random_numbers(3, 5, seed=1), random_numbers(3, 5, seed=1))
    assert not torch.equal(random_numbers(3, 5, seed=1), random_numbers(3, 5, seed=2))
    assert random_tokens(9, seed=4) == random_tokens(9, seed=4) != random_tokens(9, seed=5)
    assert set(random_tokens(5000, seed=4)) == set(range(256))


def test_a_counting_model_counts_and_changes_nothing():
    model = odd_model(3)
    counting = CountingModel(model)
    with torch.inference_mode():
        for length in (5, 3):
            tokens, batch = torch.tensor(random_tokens(length, seed=1)), Batch(new=[length])
            assert torch.equal(counting(tokens, batch), model(tokens, batch))
    assert (counting.forwards, counting.rows) == (2, 8)


@pytest.mark.parametrize(("found", "said"), [
    ([1, 2], "The mask should be a tensor; this is a list."),
    (torch.zeros(3, 2), r"The mask should have the shape \[2, 3\]; this one has \[3, 2\]."),
])
def test_a_tensor_of_another_kind_is_told_so(found, said):
    with pytest.raises(NotAnAnswer, match=said):
        tensor_in(found, (2, 3), "The mask")
    good = torch.zeros(2, 3)
    assert tensor_in(good, (2, 3), "The mask") is good


@pytest.mark.parametrize("answer", [7, (1,), (1, 2, 3), None, (..., 2), ("one", "two")])
def test_anything_but_two_numbers_is_told_so(answer):
    with pytest.raises(NotAnAnswer):
        pair_in(answer)
    assert pair_in((2, torch.tensor(3.5))) == (2, 3.5)


@pytest.mark.parametrize(("found", "place"), [
    ([5, 6, 7], None), ([5, 9, 7], 1), ([5, 6], 2), ([5, 6, 7, 8], 3), ([], 0),
])
def test_the_first_difference_may_be_a_missing_token(found, place):
    assert first_difference(found, [5, 6, 7]) == place
