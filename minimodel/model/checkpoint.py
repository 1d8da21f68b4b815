"""Checkpoints on disk, in public formats where there is one, so that other engines read them.

A folder holds
    config.json             the sizes, in one of three formats (see `formats.py`)
    model.safetensors       the weights, one tensor an expert and matrix
    model.sha256            the digest of that file: damage is noticed before a token is computed
    tokenizer.json          byte b has id b; the special tokens follow
    tokenizer_config.json, generation_config.json

In memory the experts of a layer are stacked, in the file each has its own tensors, as
`save_pretrained` writes them. Only `named_tensors` and `ExpertFile` know: the one cuts the
model's own memory into views by the file's names, and saving and loading both go through it; the
other reads experts one by one.

`transformers` loads the folder of a model whose layers share no notes, and gives the same
tokens. vLLM does where keys and values are noted.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors

from ..config import ModelConfig
from ..tokenizer import END, PAD, SPECIAL_TOKENS, START, TURN
from .formats import CheckpointError, format_in, format_of
from .transformer import Transformer

TOY = Path(__file__).parent.parent / "data" / "toy"
TOY_LATENT = TOY.with_name("toy_latent")
TOY_SHARED = TOY.with_name("toy_shared")


# --- names -----------------------------------------------------------------------------


def named_tensors(model: Transformer) -> dict[str, torch.Tensor]:
    """The model's weights by the names of the file, as views into its own memory."""
    named = {}
    for name, tensor in model.state_dict().items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        if ".experts." not in name:
            named[name] = tensor
            continue
        layer, kind = name.rsplit(".", 1)
        for expert, matrix in enumerate(tensor):
            gate, up, down = expert_names(layer, expert)
            if kind == "down_proj":
                named[down] = matrix
            else:
                named[gate], named[up] = matrix.chunk(2)
    return named


def expert_names(layer: str, expert: int) -> list[str]:
    """What the file calls an expert's three matrices: gate, up, down."""
    return [f"{layer}.{expert}.{kind}_proj.weight" for kind in ("gate", "up", "down")]


# --- saving ----------------------------------------------------------------------------


def save(model: Transformer, folder: Path) -> None:
    """Write a checkpoint. A save that fails leaves the folder's older checkpoint as it was.

    The files are made aside and moved to their places when all are there. config.json leaves
    first and arrives last: a folder whose moving was cut short has none and cannot be loaded.
    Raises CheckpointError where the folder cannot be made or written.
    """
    folder = Path(folder)
    partial = folder / ".partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        write_files(model, partial)
        (folder / "config.json").unlink(missing_ok=True)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint into {folder}: {error}. "
                              "Give a folder that you may write to, with room for it") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_files(model: Transformer, folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in named_tensors(model).items()}
    weights.write_bytes(safetensors.save(tensors, metadata={"format": "pt"}))
    (folder / "model.sha256").write_text(sha256(weights) + "\n")
    for name, content in (("config", config_json(model)), ("tokenizer", tokenizer_json()),
                          ("tokenizer_config", tokenizer_config_json(model.config)),
                          ("generation_config", generation_config_json())):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(model: Transformer) -> str:
    """The sha256 of a model's tensors as they are now, names and number type included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def config_json(model: Transformer) -> dict:
    form = format_of(model.config)
    return {"architectures": [form.architecture], "model_type": form.model_type,
            "dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch."),
            "bos_token_id": START, "eos_token_id": [END, TURN], "pad_token_id": PAD,
            **form.describe(model.config)}


def generation_config_json() -> dict:
    return {"bos_token_id": START, "eos_token_id": [END, TURN], "pad_token_id": PAD,
            "do_sample": False}


def tokenizer_config_json(config: ModelConfig) -> dict:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[START - 256],
            "eos_token": SPECIAL_TOKENS[END - 256], "pad_token": SPECIAL_TOKENS[PAD - 256],
            "clean_up_tokenization_spaces": False, "model_max_length": config.context}


def byte_stand_ins() -> list[str]:
    """A printable character for each byte, as byte-level tokenizers write them in JSON.

    Printable Latin-1 bytes stand for themselves; the others take characters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_json() -> dict:
    """A byte-level tokenizer without merges for the `tokenizers` library: byte b has id b.

    It puts the start token before a text, as `minimodel.tokenizer.encode` does.
    """
    start = SPECIAL_TOKENS[START - 256]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": True}
    mark = {"SpecialToken": {"id": start, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": 256 + i, "content": token, **special}
                         for i, token in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                          "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing", "single": [mark, text], "pair": [mark, text, second],
            "special_tokens": {start: {"id": start, "ids": [START], "tokens": [start]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                    "use_regex": False},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": {sign: byte for byte, sign in enumerate(byte_stand_ins())},
                  "merges": []}}


# --- loading ---------------------------------------------------------------------------


def load(folder: Path = TOY, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a checkpoint folder, the shipped toy by default, ready to generate.

    Raises CheckpointError for anything else: no such folder, another architecture, a
    truncated or damaged file, missing, foreign or misshapen tensors.
    """
    folder = Path(folder)
    with torch.device("meta"):                  # shapes only: nothing is allocated or drawn yet
        model = Transformer(read_config(folder))
    stored = read_tensors(folder / "model.safetensors")
    compare_tensors(folder, expected=named_tensors(model), stored=stored)
    model = model.to_empty(device="cpu").to(dtype)
    for name, tensor in named_tensors(model).items():
        tensor.copy_(stored[name])
    return model.eval()


def read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no config.json in {folder}: "
                              "give the folder of a checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return format_in(content, path).config(content, path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors, after comparing its digest where one stands beside it."""
    try:
        found = sha256(path)
        digest = path.with_name("model.sha256")
        if digest.exists() and digest.read_text(errors="replace").strip() != found:
            raise CheckpointError(f"{path} is damaged or another file: its sha256 is "
                                  f"{found[:12]}..., {digest.name} says otherwise. "
                                  "Fetch the checkpoint again")
        return safetensors.load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. "
                              "It is missing, truncated or in several shards: "
                              "fetch the checkpoint again, as one file") from error


def compare_tensors(folder: Path, expected: dict, stored: dict) -> None:
    """Raise CheckpointError unless both hold the same names and shapes, of floating numbers."""
    for problem, names in (("lacks", expected.keys() - stored.keys()),
                           ("holds foreign", stored.keys() - expected.keys())):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise CheckpointError(f"the checkpoint in {folder} {problem} tensors: {first}"
                                  f"{' and more' if len(names) > 3 else ''} ({len(names)} in all)")
    for name, tensor in expected.items():
        if stored[name].shape != tensor.shape:
            raise CheckpointError(f"{name} in {folder} has shape {list(stored[name].shape)}; "
                                  f"config.json asks for {list(tensor.shape)}")
        if not stored[name].is_floating_point():
            raise CheckpointError(f"{name} in {folder} holds {stored[name].dtype}; "
                                  "this package runs floating-point weights only")


class ExpertFile:
    """The experts of a checkpoint, each read when it is asked for.

    The file stays open: whoever replaces it puts another file in its place (as `save` does), and
    these experts are still those of the model that was loaded.
    """

    def __init__(self, folder: Path = TOY, dtype: torch.dtype = torch.float32):
        self.config, self.dtype = read_config(Path(folder)), dtype
        path = Path(folder) / "model.safetensors"
        try:
            self.file = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error

    def __call__(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of expert layer `layer`, counted from 0: gate and up as one matrix, and down."""
        experts = f"model.layers.{self.config.num_dense_layers + layer}.mlp.experts"
        gate, up, down = (self.file.get_tensor(name).to(self.dtype)
                          for name in expert_names(experts, expert))
        return torch.cat([gate, up]), down
