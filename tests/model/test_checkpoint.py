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
SHAPES = [{}, {"num_dense_layers": 0, "num_shared_experts": 3}, {"num_shared_experts": 0},
          {"num_dense_layers": 4}, {"experts_per_token": 1, "num_kv_heads": 6}]


@pytest.fixture
def folder(make_model, tmp_path):
    """A good checkpoint, for tests to break."""
    checkpoint.save(make_model(dtype=torch.float32), tmp_path / "good")
    return tmp_path / "good"


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


def test_settings_of_the_rotation_may_stand_at_the_top_as_older_files_have_them(folder):
    before = checkpoint.load(folder)
    edit_config(folder, rope_parameters="remove", rope_theta=9000, partial_rotary_factor=1.0)
    assert checkpoint.load(folder).config == before.config


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
    ('{"model_type": "qwen3_moe"}', "'qwen3_moe'")])
def test_another_architecture(folder, text, kind):
    (folder / "config.json").write_text(text)
    refused(folder, f"describes a model of type {kind}; only 'glm4_moe' can be run")


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
