"""Chapter 07: its drawings show the numbers they are given, its notebook holds its exercises."""

import re
from pathlib import Path

import pytest
import torch
from notebooks import Notebook

from minimodel.config import ModelConfig
from minimodel.engine.recall import Recall
from minimodel.lesson import chapter_07
from minimodel.lesson.exercises.chapter_07 import CHAPTER
from minimodel.lesson.exercises.common import ODD as ODD_EXPERTS
from minimodel.lesson.exercises.common import odd_model, random_tokens
from minimodel.model.batch import Batch
from minimodel.simulate import cost

ODD = ModelConfig(hidden_size=36, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10)
LATENT = ModelConfig(hidden_size=36, num_layers=5, num_heads=4, num_kv_heads=4, head_dim=10,
                     latent_size=14, nope_dim=6, rope_dim=8)
SHARED = ModelConfig(hidden_size=36, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10,
                     kv_source_layers=(0, 1, 0))
NOTEBOOK = Notebook("07_smaller_notes")


# --- where heads look ----------------------------------------------------------------------


def test_a_head_looks_where_its_changed_value_is_felt_most():
    model, layer = odd_model(seed=7, config=ODD_EXPERTS, contrast=30), 1
    tokens = random_tokens(13, seed=70)
    found = chapter_07.best_looks(model, tokens, layer)
    heads, kv_heads = ODD_EXPERTS.num_heads, ODD_EXPERTS.num_kv_heads
    assert [len(places) for places in found] == [heads // kv_heads] * kv_heads
    flat = [place for places in found for place in places]
    assert flat == [felt_most(model, tokens, layer, head) for head in range(heads)]


def felt_most(model, tokens, layer, head) -> int:
    """The row whose value weighs most in what `head` reads for the last token, by attending."""
    attention, seen = model.layers[layer].self_attn, []
    attend = attention.attend
    def spy(q, entries, part):
        for place in range(len(tokens)):
            marked = entries.clone()
            values = marked[..., marked.shape[-1] // 2:]
            values.zero_()
            values[:, place] = 1
            seen.append(attend(q, marked, part)[-1].unflatten(-1, (-1, model.config.head_dim)))
        return attend(q, entries, part)
    attention.attend = spy
    try:
        with torch.inference_mode():
            model(torch.tensor(tokens), Batch([len(tokens)], wanted=range(len(tokens))))
    finally:
        del attention.attend
    return torch.stack(seen)[:, head, 0].argmax().item()


def test_latents_have_no_keys_to_look_at():
    with pytest.raises(ValueError, match="latent_size=14: a latent holds no keys"):
        chapter_07.best_looks(odd_model(seed=7, config=LATENT), [256, 65, 66], 0)


# --- drawings ------------------------------------------------------------------------------


def test_entries_are_drawn_to_one_scale():
    drawing = chapter_07.entries_drawing({"plain": ODD, "latent": LATENT, "shared": SHARED})
    widths = [float(width) for width in re.findall(
        r'width="([\d.]+)" height="12" rx="2" style="fill:var\(--ss-notes', drawing)]
    parts = [20, 20] * 3 + [14, 8] * 5 + [20, 20] * 2
    assert widths == pytest.approx([part * 340 / 40 for part in parts], abs=0.01)
    assert "plain: 120 numbers" in drawing and "latent: 110 numbers" in drawing
    assert "shared: 80 numbers" in drawing and "layer 0's notes" in drawing.replace("&#x27;", "'")


def test_rows_that_stop_are_drawn_short():
    drawing = chapter_07.rows_drawing({"a model": [(55, 55), (0, 55), (55, 1)]})
    bars = [float(width) for width in re.findall(r'width="([\d.]+)" height="14"', drawing)]
    assert bars == pytest.approx([110, 110, 110, 110, 2], abs=0.01)
    assert drawing.count(">none</text>") == 1
    assert "55, 55, 1" in drawing.alt


def test_the_crossover_stands_in_the_figure():
    shown = chapter_07.absorb_figure([1, 8, 64], [12.5, 2.5, 0.75], [11, 2, 0.5], 20.4)
    assert "12 times" in shown.alt and "0.75 times for 64" in shown.alt and "20 rows" in shown.alt
    assert set(shown.table["kind"]) == {"measured", "modelled"}


def test_counted_bytes_and_measured_times_do_not_share_a_style():
    shown = chapter_07.ratios_figure(
        {"latent": {"bytes": 0.75, "reading": 1.25, "writing": 0.5}})
    kinds = dict(zip(shown.table["series"], shown.table["kind"], strict=True))
    assert kinds == {"latent, bytes": "modelled", "latent, reading": "measured",
                     "latent, writing": "measured"}
    assert "latent: bytes 0.75, reading 1.25, writing 0.50" in shown.alt


def test_the_bits_figure_shows_shares():
    counts = {32: Recall("story", 40, 36), 8: Recall("story", 40, 35), 2: Recall("story", 40, 1)}
    lower = {bits: Recall("story", 40, found.right // 2) for bits, found in counts.items()}
    shown = chapter_07.bits_figure({"one": counts, "other": lower})
    assert shown.table["y"] == pytest.approx([90, 87.5, 2.5, 45, 42.5, 0])
    assert "one 32: 90%" in shown.alt


def test_the_sizes_are_the_registers_and_the_configs():
    shown = chapter_07.sizes_figure({"odd": ODD})
    sizes = dict(zip(shown.table["model"], shown.table["bytes per token"], strict=True))
    kinds = dict(zip(shown.table["model"], shown.table["kind"], strict=True))
    assert sizes == {"V3 with MHA": 3_997_696, "LLaMA-3.1 405B": 516_096,
                     "DeepSeek-V3": 70_272, "DeepSeek-V4.1-Flash": 890,
                     "odd toy": ODD.kv_bytes_per_token()}
    assert [name for name, kind in kinds.items() if kind == "modelled"] == ["V3 with MHA",
                                                                           "odd toy"]


# --- recorded recall -----------------------------------------------------------------------


CARD = """# A card
| notebook | right | share | interval |
|---|---|---|---|
| story: eight facts | 1,954 of 2,001 | 97.7 % | 96.9 % to 98.2 % |
| dense: facts only, 512 bytes | 893 of 1,000 | 89.3 % | 87.2 % to 91.1 % |
"""


def test_a_cards_counts_are_read(tmp_path):
    (tmp_path / "README.md").write_text(CARD, encoding="utf-8")
    found = chapter_07.recorded_recall(tmp_path)
    assert (found["story"].right, found["story"].asked) == (1954, 2001)
    assert (found["dense"].right, found["dense"].asked) == (893, 1000)


def test_a_card_without_counts_is_refused(tmp_path):
    (tmp_path / "README.md").write_text(CARD.replace("| dense", "| thick"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"counts \['story'\]: measure story and dense"):
        chapter_07.recorded_recall(tmp_path)


@pytest.mark.parametrize("name", ["toy", "toy_latent", "toy_shared"])
def test_every_shipped_card_has_counts(name):
    folder = Path(chapter_07.__file__).parents[1] / "data" / name
    for found in chapter_07.recorded_recall(folder).values():
        assert 0 < found.right <= found.asked


# --- the byte counter ----------------------------------------------------------------------


def counted(**changes) -> float:
    inputs = {"layers": 4, "kv_heads": 2, "head_dim": 32, "latent": 0, "share": 1, "bits": 32}
    return chapter_07.count_bytes(**{**inputs, **changes})["per_token"]


def test_the_counter_starts_at_the_toys_bytes():
    config = ModelConfig()
    assert counted() == config.kv_bytes_per_token()
    start = chapter_07.byte_counter(config).values()
    assert start["per_token"] == config.kv_bytes_per_token()


@pytest.mark.parametrize(("changes", "expected"), [
    ({"layers": 126, "kv_heads": 8, "head_dim": 128, "bits": 16}, 516_096),
    ({"layers": 61, "latent": 576, "bits": 16}, 70_272),
    ({"layers": 7, "share": 3}, 3 * 512),                  # the last owner serves one layer alone
    ({"bits": 8}, 4 * (128 + 4)),
    ({"bits": 4}, 4 * (64 + 8)),
])
def test_the_counter_counts(changes, expected):
    assert counted(**changes) == expected


def test_the_derivation_of_the_chapter_gives_the_registers_number():
    entry = (cost.packed_bytes(512, bits=4, numbers_per_scale=16)
             + cost.packed_bytes(128, bits=4, numbers_per_scale=32))
    assert entry * 2.5 == chapter_07.bytes_of("S39") == 890


# --- the notebook --------------------------------------------------------------------------


def test_the_notebook_holds_every_exercise_as_its_file_has_it():
    found = NOTEBOOK.cells
    for exercise in CHAPTER.exercises.values():
        place = exercise.id.replace(".", "-")
        assert found[f"exercise-{place}"] == f'exercise("{exercise.id}")'
        if exercise.check:
            assert found[f"try-{place}"] == exercise.cell
