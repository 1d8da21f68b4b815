"""How far the toy's logits are from those of `transformers`, on the town notebook.

    python benchmarks/expert_parity.py > minimodel/data/expert_parity.json

Both read the shipped folder `minimodel/data/toy`, in float32. One JSON line, which chapter 03
prints as recorded; `tests/model/test_parity.py` checks the same on more texts.
"""

import json
import os
from datetime import date
from importlib.metadata import version

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM

from minimodel.lesson.town import RED_DOOR, TOWN
from minimodel.model import checkpoint
from minimodel.model.batch import Batch
from minimodel.tokenizer import encode


def listen(gates, place: int) -> list[torch.Tensor]:
    """A list that fills with the experts chosen by each gate: output number `place` of it."""
    heard = []
    for gate in gates:
        gate.register_forward_hook(lambda _, __, out: heard.append(out[place].sort(-1).values))
    return heard


@torch.inference_mode()
def compare(ids: list[int]) -> dict:
    ours = checkpoint.load()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.TOY, dtype=torch.float32).eval()
    theirs.set_experts_implementation("eager")
    our_experts = listen([layer.gate for layer in ours.moe_layers()], 1)
    their_experts = listen([layer.mlp.gate for layer in theirs.model.layers
                            if hasattr(layer.mlp, "experts")], 2)
    one = ours(torch.tensor(ids), Batch([len(ids)], wanted=range(len(ids))))
    other = theirs(torch.tensor([ids])).logits[0]
    same = (torch.stack(our_experts) == torch.stack(their_experts)).all(-1).all(0)
    return {"tokens": len(ids), "same_experts": same.float().mean().item(),
            "largest_difference": (one - other).abs().max().item(),
            "same_best": (one.argmax(-1) == other.argmax(-1)).float().mean().item()}


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({"date": date.today().isoformat(), "transformers": version("transformers"),
                      "torch": torch.__version__, **compare(encode(TOWN.ask(RED_DOOR)))}))


if __name__ == "__main__":
    main()
