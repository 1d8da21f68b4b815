"""How the toy learns: a curriculum of ever longer documents, two optimizers, a bias that balances.

1. The stages of a `Recipe` are run in order. Stage 0 is short rows of random strings that
   repeat: heads that look back and continue form there, within a few hundred steps. Town
   notebooks and the rest follow at growing length. Without this order recall does not
   appear in any time that two cores have.
2. One step: draw rows, predict every next byte, weigh the losses (an answer's value counts
   most), step both optimizers, move each gate's bias towards balance.
3. From 256 tokens on, half of the rows get gaps in their positions, so that the model meets
   large distances without long rows.
4. Every so many steps the whole state is written beside the log. A run that was stopped goes
   on from there and ends as if it had never stopped: what a step draws depends on the seed
   and the step's number alone.

Muon (K. Jordan, 2024) steps the hidden matrices, AdamW the embedding, head, gates and norms.
"""

import json
import pickle
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from ..config import ModelConfig
from . import checkpoint
from .batch import Batch
from .corpus import training_row
from .transformer import Transformer

ECHO_FIRST = {"notebook": 1.0, "dialogue": 0.5, "records": 0.3, "copying": 1.5, "story": 0.3,
              "sums": 0.2, "code": 0.2, "echo": 4.0}
TOWN_FIRST = {"notebook": 6.0, "dialogue": 2.0, "records": 1.0, "copying": 0.5, "story": 0.6,
              "sums": 0.5, "code": 0.4, "echo": 0.3}


@dataclass(frozen=True)
class Stage:
    """`steps` steps on rows of `length` tokens; the rate goes linearly between two fractions."""

    length: int
    steps: int
    tokens_per_step: int = 4096
    rate_from: float = 1.0
    rate_to: float = 1.0
    bias_rate: float = 0.01         # how far a gate's bias moves per step
    mix: dict[str, float] | None = None


@dataclass(frozen=True)
class Recipe:
    config: ModelConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    warmup_steps: int = 40
    position_span: int = 4096       # positions met in training reach this far
    bfloat16: bool = True           # multiply in bfloat16; weights stay float32
    start_from: str = ""            # a shipped checkpoint whose weights are taken over

    @property
    def num_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def tokens_before(self, step: int) -> int:
        """Tokens that the steps before `step` train on."""
        tokens = 0
        for stage in self.stages:
            done = max(0, min(step, stage.steps))
            tokens += done * max(1, stage.tokens_per_step // stage.length) * stage.length
            step -= stage.steps
        return tokens

    def at(self, step: int) -> tuple[Stage, float]:
        """The stage of a step and the fraction of the learning rates there."""
        first = 0
        for stage in self.stages:
            if step < first + stage.steps:
                done = (step - first) / stage.steps
                rate = stage.rate_from + (stage.rate_to - stage.rate_from) * done
                return stage, rate * min(1.0, (step + 1) / self.warmup_steps)
            first += stage.steps
        raise ValueError(f"step {step} is past the recipe's last, {self.num_steps - 1}")


SHIPPED = Recipe(
    config=ModelConfig(),
    stages=(Stage(64, 450, 2048, mix=ECHO_FIRST), Stage(128, 250), Stage(256, 900),
            Stage(512, 1200, rate_to=0.3), Stage(1024, 440, rate_from=0.6, rate_to=0.38),
            Stage(1024, 460, rate_from=0.38, rate_to=0.15, bias_rate=0.002),
            Stage(2048, 350, rate_from=0.15, rate_to=0.01, bias_rate=0.002)))

# Two other designs of attention (chapter 07). A latent takes fewer lessons: it learns faster.
LATENT = Recipe(
    config=ModelConfig(num_kv_heads=8, latent_size=64, nope_dim=16, rope_dim=32, norm_eps=1e-6),
    stages=(Stage(64, 450, 2048, mix=ECHO_FIRST), Stage(128, 250), Stage(256, 700),
            Stage(512, 520, rate_to=0.6), Stage(1024, 450, rate_from=0.6, rate_to=0.2),
            Stage(2048, 200, rate_from=0.15, rate_to=0.01, bias_rate=0.002)))

# A trained model goes on with fewer notes: as in GQA's uptraining (arXiv 2305.13245, section 2.1).
SHARED = Recipe(
    config=ModelConfig(kv_source_layers=(0, 1, 2, 2)), start_from="toy", seed=1,
    stages=(Stage(512, 250, rate_from=0.4, rate_to=0.4),
            Stage(1024, 300, rate_from=0.4, rate_to=0.2),
            Stage(2048, 200, rate_from=0.2, rate_to=0.01, bias_rate=0.002),
            Stage(1024, 400, rate_from=0.3, rate_to=0.15, bias_rate=0.004),
            Stage(2048, 300, rate_from=0.15, rate_to=0.01, bias_rate=0.002)))

SMALL = Recipe(
    config=ModelConfig(hidden_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24,
                       dense_size=256, num_experts=8, expert_size=64),
    stages=(Stage(64, 450, 2048, mix=ECHO_FIRST), Stage(128, 250),
            Stage(256, 500, rate_to=0.02)),
    position_span=1024)


# --- optimizers ------------------------------------------------------------------------


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Push all singular values of [..., rows, columns] towards one: five Newton-Schulz steps."""
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, on stacked experts too (`torch.optim.Muon`: matrices only)."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["average"] = torch.zeros_like(weight)
                state["average"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(state["average"], group["momentum"]))
                wide = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                weight.sub_(update, alpha=group["lr"] * wide)


def initialize(model: Transformer) -> None:
    """Small random weights; the layers' last matrices at half size, so that depth starts gentle."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            continue
        if "embed_tokens" in name:
            std = 0.5
        elif "lm_head" in name:
            std = 0.02
        elif "mlp.gate.weight" in name:
            std = 0.05
        else:
            last = "o_proj" in name or "down_proj" in name
            std = weight.shape[-1] ** -0.5 * (0.5 if last else 1.0)
        torch.nn.init.normal_(weight, std=std)


@torch.no_grad()
def take_over(model: Transformer, older: Transformer) -> None:
    """Start from a trained model that has all of these weights, and some that are left behind.

    Raises ValueError where it lacks one or has it in another shape.
    """
    theirs = older.state_dict()
    for name, weight in model.state_dict().items():
        if name not in theirs or theirs[name].shape != weight.shape:
            raise ValueError(f"the model to start from has no {name} of shape "
                             f"{list(weight.shape)}: start from one of the same sizes")
        weight.copy_(theirs[name])


def make_optimizers(model: Transformer, recipe: Recipe) -> list[torch.optim.Optimizer]:
    by_adam, by_muon, no_matrices = [], [], ("embed_tokens", "lm_head", "mlp.gate.weight")
    for name, weight in model.named_parameters():
        plain = weight.dim() == 1 or any(part in name for part in no_matrices)
        (by_adam if plain else by_muon).append(weight)
    adam = torch.optim.AdamW(by_adam, lr=recipe.adam_rate, betas=(0.9, 0.98), eps=1e-9,
                             weight_decay=0.0)
    return [adam, Muon(by_muon, lr=recipe.muon_rate)]


# --- one step --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Training rows: ids and positions [count, length], targets and loss weights likewise."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


def draw_rows(recipe: Recipe, step: int) -> Rows:
    stage, _ = recipe.at(step)
    rng = random.Random(f"{recipe.seed}/{step}")
    count = max(1, stage.tokens_per_step // stage.length)
    rows = [training_row(rng, stage.length, stage.mix or TOWN_FIRST) for _ in range(count)]
    ids = torch.tensor([row.ids for row in rows])
    weights = torch.tensor([row.weights for row in rows])
    positions = torch.tensor(
        [gapped_positions(rng, stage.length, recipe.position_span) for _ in rows])
    return Rows(ids[:, :-1], ids[:, 1:], weights[:, 1:], positions)


def gapped_positions(rng: random.Random, length: int, span: int) -> list[int]:
    """0, 1, 2, ... and, for half of the longer rows, with one to eight jumps within `span`."""
    if length < 256 or length >= span or rng.random() < 0.5:
        return list(range(length))
    room = int(rng.random() * (span - length))
    jumps = dict.fromkeys(rng.randrange(1, length) for _ in range(rng.randrange(1, 9)))
    for place in jumps:
        jumps[place] = int(room * rng.random())
        room -= jumps[place]
    positions, shift = [], 0
    for index in range(length):
        shift += jumps.get(index, 0)
        positions.append(index + shift)
    return positions


class GateLoads:
    """Counts which experts each gate chose, by hooks; moves the biases towards balance."""

    def __init__(self, model: Transformer):
        self.gates = [layer.gate for layer in model.moe_layers()]
        self.counts = [torch.zeros_like(gate.e_score_correction_bias) for gate in self.gates]
        self.imbalance = 1.0            # fullest expert over the mean, worst layer of the last step
        self.hooks = [gate.register_forward_hook(
            lambda _, __, out, index=index: self._count(index, out[1]))
            for index, gate in enumerate(self.gates)]

    def close(self) -> None:
        """Leave the model without the hooks: nobody counts any more."""
        for hook in self.hooks:
            hook.remove()

    def _count(self, index: int, chosen: torch.Tensor) -> None:
        self.counts[index] = chosen.flatten().bincount(minlength=len(self.counts[index])).float()

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the bias of experts below the mean load and lower the others', by `rate`."""
        for gate, count in zip(self.gates, self.counts, strict=True):
            bias = gate.e_score_correction_bias
            bias += rate * (count.mean() - count).sign()
            bias -= bias.mean()
        self.imbalance = max([(c.max() / c.mean()).item() for c in self.counts], default=1.0)


def weighted_loss(model: Transformer, rows: Rows,
                  bfloat16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean weighted loss, and logits [count, length, vocabulary]."""
    count, length = rows.ids.shape
    batch = Batch(new=[length] * count, wanted=range(count * length))
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(rows.ids.flatten(), batch, positions=rows.positions.flatten())
    losses = F.cross_entropy(logits.float(), rows.targets.flatten(), reduction="none")
    weights = rows.weights.flatten()
    return (losses * weights).sum() / weights.sum(), logits.unflatten(0, (count, length))


@torch.no_grad()
def recall_in(rows: Rows, logits: torch.Tensor) -> float | None:
    """Share of answers' values predicted whole in the step's own rows (no row is seen twice)."""
    is_value = rows.weights >= 3.0
    right = (logits.argmax(-1) == rows.targets) | ~is_value
    starts = is_value & ~F.pad(is_value, (1, 0))[:, :-1]
    if not starts.any():
        return None
    number = starts.cumsum(1) + torch.arange(len(starts))[:, None] * 10_000    # one id per value
    wrong = number[is_value & ~right].unique()
    return 1 - len(wrong) / int(starts.sum())


class Trainer:
    """A run: model, optimizers, step number. `state()` and `load()` carry it over a stop."""

    def __init__(self, recipe: Recipe):
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = Transformer(recipe.config)
        initialize(self.model)
        if recipe.start_from:
            take_over(self.model, checkpoint.load(checkpoint.TOY.with_name(recipe.start_from)))
        self.optimizers = make_optimizers(self.model, recipe)
        self.loads = GateLoads(self.model)
        self.num_done = 0

    def step(self) -> dict:
        """Train one step; returns its measurements."""
        recipe = self.recipe
        stage, rate = recipe.at(self.num_done)
        rows = draw_rows(recipe, self.num_done)
        loss, logits = weighted_loss(self.model, rows, recipe.bfloat16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.optimizers[0].param_groups[0]["params"], 1.0)
        full_rates = (recipe.adam_rate, recipe.muon_rate)
        for optimizer, full_rate in zip(self.optimizers, full_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full_rate * rate
            optimizer.step()
            optimizer.zero_grad()
        self.loads.balance(stage.bias_rate)
        self.num_done += 1
        return {"step": self.num_done, "length": stage.length, "loss": loss.item(),
                "recall": recall_in(rows, logits), "imbalance": self.loads.imbalance}

    def state(self) -> dict:
        return {"recipe": fingerprint(self.recipe), "num_done": self.num_done,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load(self, state: dict) -> None:
        """Raises ValueError for the state of another recipe, naming what differs."""
        if state["recipe"] != fingerprint(self.recipe):
            theirs, ours = json.loads(state["recipe"]), json.loads(fingerprint(self.recipe))
            differs = ", ".join(key for key in ours if ours[key] != theirs.get(key))
            raise ValueError(f"the saved run was made by another recipe ({differs} differs): "
                             "give another folder, or remove its resume.pt to start anew")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.num_done = state["num_done"]


def fingerprint(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe), sort_keys=True)


# --- a whole run -----------------------------------------------------------------------


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Under a temporary name first: a run killed while saving keeps its last good file.

    Raises OSError where the file cannot be written; nothing half-written is left then.
    """
    partial = path.with_suffix(".tmp")
    try:
        write(partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:        # torch reports a full disk as RuntimeError
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}. "
                      "Give a folder that you may write to, with room for it") from error


def read_state(path: Path) -> dict:
    """What `Trainer.state` gave. Raises ValueError for a file that is no saved run."""
    try:
        state = torch.load(path, weights_only=True)
        return {key: state[key] for key in ("recipe", "num_done", "model", "optimizers")}
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, TypeError, KeyError) as error:
        raise ValueError(f"cannot read the saved run {path}: it is damaged or something else. "
                         "Remove it to start anew") from error


def train(recipe: Recipe, folder: Path, *, report_every: int = 50, save_every: int = 100,
          progress: Callable[[dict], None] = print,
          should_stop: Callable[[], bool] = lambda: False) -> Transformer | None:
    """Run a recipe, or go on with the run that `folder` holds. Returns the model when done.

    Writes `resume.pt` and `log.jsonl` (one line a report) into `folder`. If `should_stop`
    turns true the state is saved and None is returned; the same call goes on later.
    Raises ValueError for a folder with another recipe's run, OSError for an unwritable one.
    """
    trainer, folder = Trainer(recipe), Path(folder)
    make_folder(folder)
    if (folder / "resume.pt").exists():
        trainer.load(read_state(folder / "resume.pt"))
    lines = [line for line in read_log(folder) if line["step"] <= trainer.num_done]
    write_log(folder, lines)            # a folder that cannot be written shows now, not in an hour
    seconds = lines[-1]["seconds"] if lines else 0.0
    recent, started = [], time.perf_counter()
    while trainer.num_done < recipe.num_steps and not should_stop():
        recent.append(trainer.step())
        if trainer.num_done % report_every == 0 or trainer.num_done == recipe.num_steps:
            now = time.perf_counter()
            seconds, started = seconds + now - started, now
            lines.append({**averages(recent), "tokens": recipe.tokens_before(trainer.num_done),
                          "seconds": round(seconds, 1)})
            recent = []
            progress(lines[-1])
        if trainer.num_done % save_every == 0:
            save_run(folder, trainer, lines)
    save_run(folder, trainer, lines)
    trainer.loads.close()
    return trainer.model.eval() if trainer.num_done == recipe.num_steps else None


def averages(rows: list[dict]) -> dict:
    """Means of the steps' measurements; recall only over steps that had answers."""
    out = {"step": rows[-1]["step"], "length": rows[-1]["length"]}
    for key in ("loss", "recall", "imbalance"):
        seen = [row[key] for row in rows if row[key] is not None]
        out[key] = round(sum(seen) / len(seen), 4) if seen else None
    return out


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {folder}: {error}. "
                      "Give a folder that you may write to") from error


def save_run(folder: Path, trainer: Trainer, lines: list[dict]) -> None:
    """The log first: lines past the saved step are dropped on resuming, lost ones never return."""
    write_log(folder, lines)
    write_whole(folder / "resume.pt", lambda path: torch.save(trainer.state(), path))


def write_log(folder: Path, lines: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(folder / "log.jsonl", lambda path: path.write_text(text))


def read_log(folder: Path) -> list[dict]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class StopOnSignal:
    """Asks a run to stop after its current step on Ctrl-C or SIGTERM; a second Ctrl-C kills it.

    It listens inside `with StopOnSignal() as should_stop:` and gives the signals back after.
    """

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "StopOnSignal":
        self.before = {number: signal.signal(number, self._ask)
                       for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self) -> bool:
        return self.asked

