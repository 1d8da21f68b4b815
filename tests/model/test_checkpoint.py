"""Checkpoints: what is saved comes back bit by bit, and what is broken is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimodel.model import checkpoint
from minimodel.model.checkpoint import CheckpointError

FILES = {"config.json", "model.safetensors", "model.sha256", "tokenizer.json",
         "tokenizer_config.json", "generation_config.json"}
LATENT = {"num_kv_heads": 6, "latent_size": 28, "nope_dim": 10, "rope_dim": 8}
SHARED = {"kv_source_layers": (0, 0, 2, 0)}
SHAPES = [{}, {"num_dense_layers": 0, "num_shared_experts": 3}, {"num_shared_experts": 0},
          {"num_dense_layers": 4}, {"experts_per_token": 1, "num_kv_heads": 6},
          LATENT, LATENT | {"num_dense_layers": 0, "head_dim": 26, "norm_eps": 1e-6},
          SHARED, {"kv_source_layers": (0, 1, 2, 3), "num_dense_layers": 0}, SHARED | LATENT]


@pytest.fixture
def folder(make_model, tmp_path):
    """A good checkpoint, for tests to break."""
    checkpoint.save(make_model(dtype=torch.float32), tmp_path / "good")
    return tmp_path / "good"


@pytest.fixture
def latent_folder(make_model, tmp_path):
    checkpoint.save(make_model(dtype=torch.float32, **LATENT), tmp_path / "latent")
    return tmp_path / "latent"


@pytest.fixture
def shared_folder(make_model, tmp_path):
    checkpoint.save(make_model(dtype=torch.float32, **SHARED | LATENT), tmp_path / "shared")
    return tmp_path / "shared"


def edit_config(folder, **changes):
    """Change keys of config.json; None as a value of `remove` takes the key away."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "remove"}))


def edit_tensors(folder, edit):
    """Rewrite the weights' file after `edit`, without the digest that would notice it."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.sha256").unlink()


# --- round trips ---------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_round_trip_is_exact(make_model, tmp_path, changes, dtype):
    model = make_model(dtype=dtype, **changes)
    checkpoint.save(model, tmp_path / "deep" / "down")
    again = checkpoint.load(tmp_path / "deep" / "down", dtype=dtype)
    assert again.config == model.config
    assert not again.training
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == dtype
        assert torch.equal(tensor, theirs[name]), name


def test_a_checkpoint_is_these_files_and_no_others(folder):
    assert {path.name for path in folder.iterdir()} == FILES


def test_whoever_may_read_the_config_may_read_the_weights(folder):
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_the_same_model_gives_the_same_bytes(folder, make_model, tmp_path):
    checkpoint.save(make_model(dtype=torch.float32), tmp_path / "again")
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_named_tensors_are_views_of_the_model(make_model):
    model = make_model()
    for tensor in checkpoint.named_tensors(model).values():
        tensor.zero_()
    assert all(not tensor.any() for tensor in model.state_dict().values())


def test_loading_draws_no_random_numbers(folder):
    torch.manual_seed(8)
    expected = torch.rand(3)
    torch.manual_seed(8)
    checkpoint.load(folder)
    assert torch.equal(torch.rand(3), expected)


def test_a_config_may_leave_out_what_the_format_lets_it(folder):
    before = checkpoint.load(folder)
    edit_config(folder, attention_bias="remove", hidden_act="remove", use_qk_norm="remove",
                n_group="remove", topk_group="remove", norm_topk_prob="remove",
                tie_word_embeddings="remove", dtype="remove", architectures="remove",
                bos_token_id="remove", eos_token_id="remove", first_k_dense_replace="remove",
                n_shared_experts="remove", something_new=3)
    assert checkpoint.load(folder).config == before.config


def test_a_latent_config_may_leave_out_what_the_format_lets_it(latent_folder):
    before = checkpoint.load(latent_folder)
    edit_config(latent_folder, attention_bias="remove", hidden_act="remove", head_dim="remove",
                norm_topk_prob="remove", tie_word_embeddings="remove", scoring_func="remove",
                topk_method="remove", moe_layer_freq="remove", rope_interleave="remove",
                n_shared_experts="remove", qk_head_dim=18, ep_size=1)
    assert checkpoint.load(latent_folder).config == before.config


def test_settings_of_the_rotation_may_stand_at_the_top_as_older_files_have_them(folder):
    before = checkpoint.load(folder)
    edit_config(folder, rope_parameters="remove", rope_theta=9000, partial_rotary_factor=1.0)
    assert checkpoint.load(folder).config == before.config


# --- the formats ---------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "architecture", "model_type"), [
    ({}, "Glm4MoeForCausalLM", "glm4_moe"), (LATENT, "DeepseekV3ForCausalLM", "deepseek_v3"),
    (SHARED, "SecondSendForCausalLM", "second_send"),
    (SHARED | LATENT, "SecondSendForCausalLM", "second_send")], ids=str)
def test_the_sizes_decide_the_format(make_model, tmp_path, changes, architecture, model_type):
    checkpoint.save(make_model(**changes), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["architectures"], written["model_type"]) == ([architecture], model_type)


def test_the_latent_format_by_hand(latent_folder):
    written = json.loads((latent_folder / "config.json").read_text())
    expected = {"kv_lora_rank": 28, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "head_dim": 8,
                "v_head_dim": 14, "num_attention_heads": 6, "num_key_value_heads": 6,
                "q_lora_rank": None, "rope_interleave": True, "scoring_func": "sigmoid",
                "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                "routed_scaling_factor": 1.7, "num_nextn_predict_layers": 0}
    assert {key: written[key] for key in expected} == expected
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 9000.0}


def test_our_own_format_has_our_own_names(shared_folder, make_config):
    written = json.loads((shared_folder / "config.json").read_text())
    config = make_config(**SHARED | LATENT)
    assert written["kv_source_layers"] == [0, 0, 2, 0]
    for name, value in vars(config).items():
        assert written[name] == (list(value) if name == "kv_source_layers" else value)


def test_a_layer_that_reads_anothers_notes_has_no_matrices_for_them_in_the_file(shared_folder):
    names = load_file(shared_folder / "model.safetensors").keys()
    makers = {name.split(".")[2] for name in names if "kv_a_" in name}
    lookers = {name.split(".")[2] for name in names if "kv_b_" in name}
    assert (makers, lookers) == ({"0", "2"}, {"0", "1", "2", "3"})


def test_no_other_engine_takes_our_own_format_for_its_own(shared_folder):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="second_send"):
        transformers.AutoModelForCausalLM.from_pretrained(shared_folder)


@pytest.mark.parametrize("toy", [checkpoint.TOY, checkpoint.TOY_LATENT, checkpoint.TOY_SHARED],
                         ids=lambda path: path.name)
def test_a_shipped_toy_is_saved_as_it_was_shipped(toy, tmp_path):
    if not (toy / "config.json").exists():
        pytest.skip(f"minimodel/data/{toy.name} is not there")
    checkpoint.save(checkpoint.load(toy), tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (toy / name).read_bytes(), name


# --- saving that fails ---------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_refused(make_model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/sub.* Give a folder"):
        checkpoint.save(make_model(), tmp_path / "file" / "sub")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("broken", ["sha256", "tokenizer_json", "generation_config_json"])
def test_a_save_that_fails_keeps_the_older_checkpoint(folder, make_model, monkeypatch, broken):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(*_, **__):
        raise OSError("no space left")
    monkeypatch.setattr(checkpoint, broken, full_disk)
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint.save(make_model(seed=2, dtype=torch.float32), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("moved", range(5))
def test_a_save_killed_while_moving_is_no_checkpoint_until_it_is_done_again(
        folder, make_model, monkeypatch, moved):
    """Old weights beside a new config.json of the same shapes would answer wrongly, silently."""
    other, done = make_model(seed=2, dtype=torch.float32, rope_theta=77.0), []
    plain_replace = type(folder).replace

    class Killed(BaseException):
        pass

    def replace(path, target):
        if len(done) == moved:
            raise Killed
        done.append(target)
        return plain_replace(path, target)
    monkeypatch.setattr(type(folder), "replace", replace)
    with pytest.raises(Killed):
        checkpoint.save(other, folder)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        checkpoint.load(folder)
    checkpoint.save(other, folder)
    assert checkpoint.load(folder).config.rope_theta == 77.0


def test_leftovers_of_a_killed_save_do_no_harm(folder, make_model):
    (folder / ".partial").mkdir()
    (folder / ".partial" / "model.safetensors").write_bytes(b"half")
    model = checkpoint.load(folder)
    checkpoint.save(model, folder)
    assert {path.name for path in folder.iterdir()} == FILES


# --- broken checkpoints --------------------------------------------------------------------


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(folder)
    assert str(folder) in str(error.value)


def test_no_folder_at_all(tmp_path):
    refused(tmp_path / "nowhere", r"no config\.json in .*nowhere: give the folder of a checkpoint")


def test_a_file_in_place_of_a_folder(folder):
    refused(folder / "config.json", "cannot read|no config")


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"cannot read .*model\.safetensors.*missing, truncated or in several shards")


def test_sharded_weights(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "several shards: fetch the checkpoint again, as one file")


@pytest.mark.parametrize("with_digest", [True, False])
@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_truncated_weights(folder, size, with_digest):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    if not with_digest:
        (folder / "model.sha256").unlink()
    refused(folder, r"model\.safetensors is damaged" if with_digest else "truncated")


def test_a_flipped_bit(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    refused(folder, r"damaged or another file: its sha256 is .* model\.sha256 says otherwise")


def test_a_digest_that_is_no_text(folder):
    (folder / "model.sha256").write_bytes(b"\xff\xfe\x00")
    refused(folder, r"model\.sha256 says otherwise")


def test_weights_of_another_checkpoint(folder, make_model, tmp_path):
    checkpoint.save(make_model(seed=2, dtype=torch.float32), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    refused(folder, "damaged or another file")


def test_missing_tensors_are_named_and_counted(folder):
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if ".experts.5." in name])
    refused(folder, r"lacks tensors: model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight, "
                    r".* and more \(9 in all\)")


def test_foreign_tensors_are_named(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.9.extra": torch.ones(2)}))
    refused(folder, r"holds foreign tensors: model\.layers\.9\.extra \(1 in all\)")


def test_experts_stacked_in_the_file_are_refused(folder):
    """`transformers` would load such a file, other engines would not: we never write one."""
    edit_tensors(folder, lambda t: t.update(
        {"model.layers.1.mlp.experts.down_proj": torch.zeros(7, 46, 22)}))
    refused(folder, "holds foreign tensors")


def test_a_wrong_shape(folder):
    name = "model.layers.2.mlp.experts.3.gate_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].T.contiguous()}))
    refused(folder, rf"{name} .* has shape \[46, 22\]; config.json asks for \[22, 46\]")


def test_weights_that_are_no_fractions(folder):
    name = "model.norm.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    refused(folder, rf"{name} .* holds torch.int8; this package runs floating-point weights only")


@pytest.mark.parametrize("text", ["", "{", "nonsense", "\xff", '{"model_type": }'])
def test_a_config_that_is_no_json(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, r"cannot read .*config\.json")


@pytest.mark.parametrize(("text", "kind"), [
    ("[]", "'list'"), ("3", "'int'"), ("null", "'NoneType'"), ("{}", "None"),
    ('{"model_type": "qwen3_moe"}', "'qwen3_moe'"), ('"glm4_moe"', "'str'"),
    ('{"model_type": ["glm4_moe"]}', r"\['glm4_moe'\]"),
    ('{"model_type": "deepseek_v2"}', "'deepseek_v2'")])
def test_another_architecture(folder, text, kind):
    (folder / "config.json").write_text(text)
    refused(folder, f"describes a model of type {kind}; "
                    "only 'glm4_moe', 'deepseek_v3', 'second_send' can be run")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "second_send"])
def test_a_config_that_names_another_format_than_it_is_in(folder, model_type):
    edit_config(folder, model_type=model_type)
    refused(folder, "q_lora_rank=1536" if model_type == "deepseek_v3" else "lacks num_layers")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "n_routed_experts",
                                 "max_position_embeddings", "head_dim"])
def test_a_missing_size(folder, key):
    edit_config(folder, **{key: "remove"})
    refused(folder, rf"config\.json lacks {key}")


def test_a_missing_theta(folder):
    edit_config(folder, rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0})
    refused(folder, "lacks rope_theta")


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": "46"}, "impossible model: hidden_size='46' must be a number of type int"),
    ({"hidden_size": 46.5}, "impossible model: hidden_size=46.5 must be a number"),
    ({"hidden_size": None}, "impossible model: hidden_size=None"),
    ({"num_hidden_layers": True}, "impossible model: num_layers=True"),
    ({"num_experts_per_tok": 8}, "impossible model: experts_per_token=8 must be between 1 and"),
    ({"num_attention_heads": 7}, "impossible model: num_heads=7 must be a multiple"),
    ({"rms_norm_eps": float("nan")}, "impossible model: norm_eps=nan"),
    ({"rms_norm_eps": [1]}, r"impossible model: norm_eps=\[1\]"),
    ({"hidden_size": 10 ** 7}, r"has shape \[271, 46\]; config.json asks for \[271, 10000000\]"),
    ({"num_hidden_layers": 3}, "holds foreign tensors"),
    ({"num_hidden_layers": 5}, "lacks tensors"),
    ({"attention_bias": True}, "attention_bias=True; this package runs False only"),
    ({"use_qk_norm": True}, "use_qk_norm=True; this package runs False only"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'; this package runs 'silu' only"),
    ({"n_group": 2}, "n_group=2; this package runs 1 only"),
    ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    ({"num_nextn_predict_layers": "remove"}, "num_nextn_predict_layers=1; this package runs 0"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0}}, "rope_type='yarn'"),
    ({"rope_parameters": {"rope_theta": 9.0}}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": [1]}, r"rope_parameters=\[1\]; it must name rope_theta"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling=.* runs None only"),
], ids=str)
def test_a_config_that_cannot_be_run(folder, changes, message):
    edit_config(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize(("changes", "message"), [
    ({"q_lora_rank": 96}, "q_lora_rank=96; this package runs None only"),
    ({"q_lora_rank": "remove"}, "q_lora_rank=1536; this package runs None only"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax'; this package runs 'sigmoid' only"),
    ({"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'; .*'noaux_tc'"),
    ({"rope_interleave": False}, "rope_interleave=False; this package runs True only"),
    ({"moe_layer_freq": 2}, "moe_layer_freq=2; this package runs 1 only"),
    ({"n_group": "remove"}, "n_group=8; this package runs 1 only"),
    ({"topk_group": 4}, "topk_group=4; this package runs 1 only"),
    ({"norm_topk_prob": False}, "norm_topk_prob=False; this package runs True only"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1; this package runs 0 only"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*'fp8'.* None only"),
    ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling=.*yarn.* runs None only"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 9.0}}, "rope_type='yarn'"),
    ({"rope_parameters": {"type": "yarn", "rope_theta": 9.0}}, "rope_type='yarn'; .*'default'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 9.0}},
     "partial_rotary_factor=0.5; this package runs 1.0 only"),
    ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
    ({"kv_lora_rank": "remove"}, "lacks kv_lora_rank"),
    ({"kv_lora_rank": None}, "impossible model: latent_size=None must be a number of type int"),
    ({"kv_lora_rank": 0}, "impossible model: nope_dim=10 needs a latent_size"),
    ({"qk_nope_head_dim": 0}, "impossible model: nope_dim=0 must be at least 1"),
    ({"qk_rope_head_dim": 7}, "impossible model: rope_dim=7 must be even"),
    ({"num_key_value_heads": 2}, "impossible model: num_kv_heads=2 must equal num_heads=6"),
    ({"kv_lora_rank": 27}, r"kv_a_proj_with_mqa.* has shape \[36, 46\]; .*asks for \[35, 46\]"),
    ({"first_k_dense_replace": "remove"}, "tensors: .*mlp"),
], ids=str)
def test_a_latent_config_that_cannot_be_run(latent_folder, changes, message):
    edit_config(latent_folder, **changes)
    refused(latent_folder, message)


@pytest.mark.parametrize(("changes", "message"), [
    ({"kv_source_layers": "remove"}, "lacks kv_source_layers"),
    ({"latent_size": "remove", "rope_theta": "remove"}, "lacks latent_size, rope_theta"),
    ({"kv_source_layers": 2}, "kv_source_layers=2; it must be a list"),
    ({"kv_source_layers": None}, "kv_source_layers=None; it must be a list"),
    ({"kv_source_layers": [0, 0, 2]}, r"impossible model: kv_source_layers=\(0, 0, 2\) must name"),
    ({"kv_source_layers": [0, 0, 2, 3.0]}, "impossible model: kv_source_layers=.* whole numbers"),
    ({"kv_source_layers": [0, 0, 1, 0]}, "must point to owners: layer 2 reads layer 1"),
    ({"kv_source_layers": [0, 0, 2, 2, 2]}, "kv_source_layers=.* num_layers=4"),
    ({"kv_source_layers": [0, 0, 0, 0]}, r"foreign tensors: model\.layers\.2\.self_attn\.kv_a"),
    ({"kv_source_layers": []}, r"lacks tensors: model\.layers\.1\.self_attn\.kv_a"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling=.* runs None only"),
    ({"hidden_size": "46"}, "impossible model: hidden_size='46' must be a number of type int"),
], ids=str)
def test_a_config_in_our_own_format_that_cannot_be_run(shared_folder, changes, message):
    edit_config(shared_folder, **changes)
    refused(shared_folder, message)


# --- single experts ------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"num_dense_layers": 0}, LATENT, SHARED], ids=str)
def test_each_expert_can_be_read_alone(make_model, tmp_path, changes):
    model = make_model(dtype=torch.float32, **changes)
    checkpoint.save(model, tmp_path)
    read = checkpoint.ExpertFile(tmp_path, torch.float64)
    for layer, moe in enumerate(model.moe_layers()):
        for expert in range(model.config.num_experts):
            gate_up, down = read(layer, expert)
            assert torch.equal(gate_up, moe.experts.gate_up_proj[expert].double())
            assert torch.equal(down, moe.experts.down_proj[expert].double())


def test_an_open_file_s_experts_are_those_of_before_it_was_replaced(folder, make_model):
    read = checkpoint.ExpertFile(folder)
    before = read(1, 3)
    checkpoint.save(make_model(seed=2, dtype=torch.float32), folder)
    for again, once in zip(read(1, 3), before, strict=True):
        assert torch.equal(again, once)
    assert not torch.equal(checkpoint.ExpertFile(folder)(1, 3)[1], before[1])


def test_experts_of_no_file(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        checkpoint.ExpertFile(folder)
