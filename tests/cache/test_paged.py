"""The paged cache: where entries go, that they come back, and that blocks may lie anywhere."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel.cache.dense import DenseCache
from minimodel.cache.paged import PagedCache
from minimodel.config import ModelConfig
from minimodel.model.batch import Batch

SHARED = {"kv_source_layers": (0, 0, 2, 2)}
LATENT = {"num_kv_heads": 6, "latent_size": 26, "nope_dim": 10, "rope_dim": 8}

# Blocks of 5 for sequences of up to 18, 9, 13 and 20 tokens: out of order, with gaps.
TABLES = [[11, 2, 7, 0], [4, 9], [13, 1, 6], [3, 14, 5, 10]]
STEPS = [                           # new tokens of each sequence; sequences that are left out: 0
    [7, 3, 5, 0],                   # prompts of different lengths; the third fills its block
    [4, 1, 1, 12],                  # a chunk, decodes and a new prompt side by side
    [1, 1, 1, 1],                   # decodes of lengths 12, 5, 7, 13: ragged parts
    [1, 0, 1, 1],
    [5, 2, 3, 0],
    [0, 1, 1, 2],
]


@pytest.fixture(params=[{}, SHARED, LATENT, LATENT | SHARED], ids=str)
def model(request, make_model):
    with torch.inference_mode():
        yield make_model(**request.param)


def make_cache(config, num_blocks=15, block_size=5):
    return PagedCache(config, num_blocks, block_size, dtype=torch.float64)


def steps():
    """The batches of STEPS, with `sequences` named, and their tokens."""
    rng, past = Random("paged"), [0] * len(TABLES)
    for new in STEPS:
        going_on = [i for i, count in enumerate(new) if count]
        yield (Batch(new=[new[i] for i in going_on], past=[past[i] for i in going_on],
                     sequences=going_on),
               torch.tensor(rng.choices(range(256), k=sum(new))))
        past = [have + count for have, count in zip(past, new, strict=True)]


# --- the same as dense --------------------------------------------------------------------------

def test_shuffled_blocks_give_the_logits_of_one_stretch_of_memory(model):
    dense = DenseCache(model.config, 20, len(TABLES), dtype=torch.float64)
    paged = make_cache(model.config)
    ragged = 0
    for batch, tokens in steps():
        expected = model(tokens, batch, dense)
        dense.commit(batch)
        ours = model(tokens, batch, paged.step(TABLES, batch))
        assert ours.argmax(-1).tolist() == expected.argmax(-1).tolist()
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
        ragged += sum(bool(part.pasts) for part in batch.parts)
    assert ragged >= 2, "no part of different lengths: choose other steps"


def test_where_blocks_lie_changes_no_bit(model):
    here, there = make_cache(model.config), make_cache(model.config)
    moved = [[14 - block for block in table] for table in TABLES]
    for batch, tokens in steps():
        assert torch.equal(model(tokens, batch, here.step(TABLES, batch)),
                           model(tokens, batch, there.step(moved, batch)))


def test_what_lies_in_other_blocks_and_behind_the_entries_is_never_read(model):
    clean, littered = make_cache(model.config), make_cache(model.config)
    littered.blocks.fill_(-1e6)
    for batch, tokens in steps():
        torch.testing.assert_close(model(tokens, batch, littered.step(TABLES, batch)),
                                   model(tokens, batch, clean.step(TABLES, batch)),
                                   rtol=0, atol=1e-11)


def test_a_block_can_be_sent_as_bytes(model):
    """Each block's bytes, alone, put at another place of another cache: reading goes on."""
    here, there = make_cache(model.config), make_cache(model.config, num_blocks=17)
    (batch, tokens), *rest = steps()
    model(tokens, batch, here.step(TABLES, batch))
    for block in range(15):
        sent = here.blocks[block].numpy().tobytes()
        assert len(sent) == here.block_bytes
        received = torch.frombuffer(bytearray(sent), dtype=torch.float64)
        there.blocks[block + 2] = received.view(there.blocks.shape[1:])
    moved = [[block + 2 for block in table] for table in TABLES]
    for batch, tokens in rest:
        assert torch.equal(model(tokens, batch, here.step(TABLES, batch)),
                           model(tokens, batch, there.step(moved, batch)))


def test_tables_that_share_blocks_read_the_same_beginning(model):
    cache = make_cache(model.config)
    prompt = torch.arange(10) * 23 % 256
    batch = Batch(new=[10])
    model(prompt, batch, cache.step([[8, 3]], batch))
    both = Batch(new=[2, 2], past=[10, 10])
    tokens = torch.tensor([5, 6, 5, 6])
    logits = model(tokens, both, cache.step([[8, 3, 0], [8, 3, 12]], both))
    alone = model(torch.cat((prompt, tokens[:2])), Batch(new=[12]))
    torch.testing.assert_close(logits, alone.expand(2, -1), rtol=0, atol=1e-11)


def test_a_copied_block_carries_all_layers_and_nothing_else_changes(model):
    cache = make_cache(model.config)
    batch, tokens = next(steps())
    model(tokens, batch, cache.step(TABLES, batch))
    before = cache.blocks.clone()
    cache.copy(source=2, target=8)
    assert torch.equal(cache.blocks[8], before[2])
    assert before[2].abs().sum(dim=(1, 2)).min() > 0        # every layer of it holds something
    rest = [block for block in range(15) if block != 8]
    assert torch.equal(cache.blocks[rest], before[rest])


# --- places -------------------------------------------------------------------------------------

def test_memory_has_the_documented_shape(make_config):
    config = make_config(**SHARED)
    cache = PagedCache(config, 11, 5)
    assert cache.blocks.shape == (11, 2, 5, config.entry_width)
    assert cache.block_bytes == 5 * config.kv_bytes_per_token(4)
    assert PagedCache(config, 3).block_size == 16


def test_a_block_is_one_piece_of_memory(make_config):
    cache = make_cache(make_config())
    starts = [block.data_ptr() - cache.blocks.data_ptr() for block in cache.blocks]
    assert starts == [i * cache.block_bytes for i in range(15)]
    assert all(block.is_contiguous() for block in cache.blocks)


def test_every_entry_goes_to_its_slot(make_config):
    cache = make_cache(make_config())
    batch = Batch(new=[7, 1, 3], past=[4, 5, 0], sequences=[0, 2, 1])
    step = cache.step(TABLES, batch)
    width = cache.blocks.shape[-1]
    for layer in (0, 3):
        rows = torch.arange(1.0, 12.0, dtype=torch.float64) + 100 * layer
        step.write(layer, rows[:, None].expand(-1, width), batch)
    expected = torch.zeros(15, 4, 5, dtype=torch.float64)
    places = [(11, 4), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (7, 0),   # positions 4 to 10
              (1, 0), (4, 0), (4, 1), (4, 2)]
    for row, (block, slot) in enumerate(places, 1):
        expected[block, 0, slot], expected[block, 3, slot] = row, row + 300
    assert torch.equal(cache.blocks, expected[..., None].expand(-1, -1, -1, width))


@settings(max_examples=60)
@given(data=st.data())
def test_what_was_written_is_read_in_order(data):
    """Any tables, lengths and chunks, against a plain list a sequence and layer."""
    config = ModelConfig(num_layers=2, num_dense_layers=2, num_heads=2, num_kv_heads=1, head_dim=2)
    block_size = data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(24)))
    count = data.draw(st.integers(1, 4))
    tables = [order[6 * i:6 * i + 6] for i in range(count)]
    cache, notes = PagedCache(config, 24, block_size), {}
    lengths, serial = [0] * count, 0
    for _ in range(data.draw(st.integers(1, 4))):
        rooms = [6 * block_size - length for length in lengths]
        going_on = [i for i, room in enumerate(rooms) if room]
        if not going_on:
            break
        new = [data.draw(st.integers(1, min(rooms[i], 5))) for i in going_on]
        batch = Batch(new=new, past=[lengths[i] for i in going_on], sequences=going_on)
        step = cache.step(tables, batch)
        for layer in range(2):
            entries = torch.arange(serial, serial + 4 * batch.num_rows).view(-1, 4).float()
            serial += entries.numel()
            step.write(layer, entries, batch)
            rows = iter(entries.tolist())
            for i, added in zip(going_on, new, strict=True):
                notes.setdefault((i, layer), []).extend(next(rows) for _ in range(added))
            for part in batch.parts:
                read = step.read(layer, part)
                assert read.shape == (part.count, part.length, 4)
                for place, length in enumerate(part.lengths):
                    sequence = part.first_sequence + place
                    assert read[place, :length].tolist() == notes[sequence, layer]
        for i, added in zip(going_on, new, strict=True):
            lengths[i] += added


# --- errors -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 5), (3, 0), (-2, 5)])
def test_a_cache_that_holds_nothing_is_refused(make_config, num_blocks, block_size):
    with pytest.raises(ValueError, match=f"a cache of {num_blocks} blocks of {block_size} tokens "
                                         "holds nothing: both must be at least 1"):
        PagedCache(make_config(), num_blocks, block_size)


def test_a_table_that_is_too_short_is_named_before_anything_is_written(make_config):
    cache = make_cache(make_config())
    with pytest.raises(ValueError, match="sequence 1 needs room for 11 tokens, and its table of 2 "
                                         "blocks has room for 10: grow the table first"):
        cache.step(TABLES, Batch(new=[2, 3], past=[0, 8]))
    cache.step(TABLES, Batch(new=[2, 3], past=[0, 7]))      # to the brim


def test_another_number_type_is_refused(make_model):
    model = make_model()
    cache, batch = PagedCache(model.config, 3, 5), Batch(new=[3])
    with pytest.raises(ValueError, match=r"float64 and the cache's torch\.float32: make the cache"):
        model(torch.arange(3), batch, cache.step([[1]], batch))


def test_no_graph_grows_behind_the_notes(make_model):
    model = make_model()
    cache, batch = make_cache(model.config), Batch(new=[3])
    assert model(torch.arange(3), batch, cache.step([[1]], batch)).requires_grad
    assert not cache.blocks.requires_grad
