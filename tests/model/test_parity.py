"""The same files, read by `transformers`: the same names, ids, experts, logits and tokens."""

import json
from random import Random

import pytest
import torch

from minimodel.cache.dense import DenseCache
from minimodel.config import ModelConfig
from minimodel.engine.generate import generate_with_cache
from minimodel.model import checkpoint
from minimodel.model.corpus import town_notebook
from minimodel.tokenizer import encode

transformers = pytest.importorskip("transformers", minversion="5.0",
                                   reason="transformers is not installed (pip install '.[dev]')")

LATENT = {"num_kv_heads": 6, "latent_size": 28, "nope_dim": 10, "rope_dim": 8}
SHAPES = [{}, {"num_dense_layers": 2, "num_shared_experts": 2, "experts_per_token": 1},
          {"num_dense_layers": 0, "num_kv_heads": 6, "experts_per_token": 7, "expert_scale": 1.0},
          {"num_kv_heads": 1, "num_heads": 5, "head_dim": 26, "norm_eps": 1e-6}]
LATENT_SHAPES = [
    LATENT,
    LATENT | {"num_dense_layers": 2, "num_shared_experts": 2, "experts_per_token": 1},
    LATENT | {"num_dense_layers": 0, "experts_per_token": 7, "head_dim": 26, "rope_dim": 2},
    LATENT | {"num_heads": 5, "num_kv_heads": 5, "head_dim": 9, "norm_eps": 1e-6, "nope_dim": 1}]
TOLERANCE = 2e-5        # float32, logits of about 4: other orders of addition, nothing else


def load_theirs(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    latent = model.config.model_type == "deepseek_v3"
    assert type(model).__name__ == ("DeepseekV3ForCausalLM" if latent else "Glm4MoeForCausalLM")
    model.set_experts_implementation("eager")
    return model.eval()


def both(make_model, folder, changes):
    """Our model, theirs from the files that we wrote, and the files' folder."""
    model = make_model(dtype=torch.float32, **changes)
    checkpoint.save(model, folder)
    return model, load_theirs(folder), folder


@pytest.fixture(params=SHAPES + LATENT_SHAPES, ids=str, scope="module")
def pair(request, make_model, tmp_path_factory):
    return both(make_model, tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(params=LATENT_SHAPES, ids=str, scope="module")
def latent_pair(request, make_model, tmp_path_factory):
    return both(make_model, tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(params=["absorbed", "unfolded"])
def form(request, monkeypatch):
    """Latent attention in one of its forms, whatever the counted work says."""
    monkeypatch.setattr(ModelConfig, "absorbs", lambda config, new: (
        bool(config.latent_size) and request.param == "absorbed"))


def chosen_and_logits(ours, theirs, prompt):
    """Experts that every gate chose [layers][rows, k], sorted, and logits [rows, vocabulary]."""
    seen = {"ours": [], "theirs": []}
    hooks = [layer.gate.register_forward_hook(lambda _, __, out: seen["ours"].append(out[1]))
             for layer in ours.moe_layers()]
    hooks += [layer.mlp.gate.register_forward_hook(lambda _, __, out: seen["theirs"].append(out[2]))
              for layer in theirs.model.layers if hasattr(layer.mlp, "experts")]
    with torch.inference_mode():
        tokens = torch.tensor([prompt])
        logits = ours.logits_everywhere(tokens)[0], theirs(tokens).logits[0]
    for hook in hooks:
        hook.remove()
    return [[rows.sort(-1).values for rows in seen[side]] for side in ("ours", "theirs")], logits


def greedy(theirs, prompt, count):
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count,
                              do_sample=False)
    return out[0, len(prompt):].tolist()


def assert_same(ours, theirs, prompt, count):
    (our_experts, their_experts), (our_logits, their_logits) = chosen_and_logits(
        ours, theirs, prompt)
    assert len(our_experts) == len(their_experts) == ours.config.num_moe_layers
    for layer, (one, other) in enumerate(zip(our_experts, their_experts, strict=True)):
        assert torch.equal(one, other), f"MoE layer {layer} chose other experts"
    torch.testing.assert_close(our_logits, their_logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert generate_with_cache(ours, prompt, count) == greedy(theirs, prompt, count)


@pytest.mark.parametrize("length", [2, 19, 61])
def test_same_experts_logits_and_tokens(pair, length):
    ours, theirs, _ = pair
    assert any(layer.gate.e_score_correction_bias.any() for layer in ours.moe_layers())
    assert_same(ours, theirs, Random(f"parity/{length}").choices(range(264), k=length), 13)


def test_both_forms_of_latent_attention_give_the_same(latent_pair, form):
    ours, theirs, _ = latent_pair
    assert_same(ours, theirs, Random("parity/forms").choices(range(264), k=23), 13)


def test_the_same_notes_are_kept(latent_pair):
    """Both caches hold the normalised latent and the one turned key of every token."""
    ours, theirs, _ = latent_pair
    prompt = Random("parity/notes").choices(range(264), k=21)
    with torch.inference_mode():
        kept = theirs(torch.tensor([prompt]), use_cache=True).past_key_values.layers
        cache = DenseCache(ours.config, len(prompt))
        ours(torch.tensor(prompt), cache.batch([len(prompt)]), cache)
    assert len(cache.entries) == len(kept)
    for entries, layer in zip(cache.entries[:, 0], kept, strict=True):
        torch.testing.assert_close(entries, torch.cat((layer.keys, layer.values), -1)[0, 0],
                                   rtol=TOLERANCE, atol=TOLERANCE)


def test_the_file_holds_the_tensors_that_save_pretrained_writes(pair, tmp_path):
    from safetensors.torch import load_file
    _, theirs, folder = pair
    theirs.save_pretrained(tmp_path)
    our_file, their_file = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert our_file.keys() == their_file.keys()
    for name, tensor in our_file.items():
        assert torch.equal(tensor, their_file[name]), name


def test_what_save_pretrained_writes_is_read_here(pair, tmp_path):
    ours, theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    again = checkpoint.load(tmp_path)
    assert again.config == ours.config
    assert all(torch.equal(tensor, again.state_dict()[name])
               for name, tensor in ours.state_dict().items())


def test_the_config_is_read_with_nothing_left_over_or_defaulted(pair):
    ours, theirs, folder = pair
    written = json.loads((folder / "config.json").read_text())
    for key, value in written.items():
        if key not in ("dtype", "rope_parameters"):
            assert getattr(theirs.config, key) == value, key
    assert theirs.config.rope_parameters == written["rope_parameters"]
    assert theirs.num_parameters() == ours.config.num_parameters()


# --- the tokenizer ---------------------------------------------------------------------------


@pytest.fixture(params=[{}, LATENT, {"kv_source_layers": (0, 0, 2, 2)}], ids=str, scope="module")
def saved(request, make_model, tmp_path_factory):
    """A folder in each format: all have the same tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoint.save(make_model(**request.param), folder)
    return folder


@pytest.fixture(scope="module")
def their_tokenizer(saved):
    return transformers.AutoTokenizer.from_pretrained(saved)


def test_every_byte_has_its_own_id_in_the_file(saved):
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    stand_ins = checkpoint.byte_stand_ins()
    assert len(set(stand_ins)) == 256
    assert [tokenizer.token_to_id(sign) for sign in stand_ins] == list(range(256))
    assert tokenizer.get_vocab_size() == 264


def test_all_bytes_that_text_can_hold_are_encoded_alike(their_tokenizer):
    """UTF-8 text never holds the bytes C0, C1 and F5 to FF; the test above has those."""
    codes = [*range(0x800), *range(0x800, 0x110000, 61)]
    text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    assert set(text.encode()) == set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert their_tokenizer(text).input_ids == encode(text)
    assert their_tokenizer.decode(encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["", " ", "  two  spaces ", "a\r\nb\n\n", "Bäh, 'twas I'll. ?"])
def test_nothing_is_cleaned_up_split_or_merged(their_tokenizer, text):
    assert their_tokenizer(text).input_ids == encode(text)
    assert their_tokenizer.decode(encode(text), skip_special_tokens=True) == text


def test_the_special_tokens_are_the_same(their_tokenizer):
    from minimodel.tokenizer import END, PAD, SPECIAL_TOKENS, START
    assert their_tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(256, 264))
    ids = (their_tokenizer.bos_token_id, their_tokenizer.eos_token_id, their_tokenizer.pad_token_id)
    assert ids == (START, END, PAD)


# --- the shipped toy -------------------------------------------------------------------------


@pytest.mark.parametrize("toy", [checkpoint.TOY, checkpoint.TOY_LATENT], ids=lambda path: path.name)
def test_the_shipped_toy_answers_the_same(toy):
    if not (toy / "config.json").exists():
        pytest.skip(f"the trained toy is not in minimodel/data/{toy.name}")
    ours, theirs = checkpoint.load(toy), load_theirs(toy)
    for number in range(3):
        notebook = town_notebook(Random(f"parity/toy/{number}"), 300 + 150 * number, 4)
        prompt = encode(notebook.ask(notebook.facts[number]))
        (ours_chose, theirs_chose), (our_logits, their_logits) = chosen_and_logits(
            ours, theirs, prompt)
        same = torch.stack([(one == other).all(-1) for one, other
                            in zip(ours_chose, theirs_chose, strict=True)]).all(0)
        # A near tie may tip one choice in thousands; from there on, rows that read it may differ.
        until = len(same) if same.all() else int(same.int().argmin())
        assert until > 0.9 * len(same)
        torch.testing.assert_close(our_logits[:until], their_logits[:until], rtol=1e-3, atol=1e-3)
        assert generate_with_cache(ours, prompt, 40) == greedy(theirs, prompt, 40)
