"""What the workers of test_experts.py do: each rank is a process, and reports numbers."""

import torch

from minimodel.cache.paged import PagedCache
from minimodel.cluster.balance import Placement, in_order, place_experts
from minimodel.cluster.experts import serve_together, shard, take_part
from minimodel.config import ModelConfig
from minimodel.engine.engine import Engine
from minimodel.engine.request import Sampling
from minimodel.engine.scheduler import Limits
from minimodel.model.batch import Batch
from minimodel.model.moe import MoE
from minimodel.model.transformer import Transformer

CONFIG = ModelConfig(vocab_size=271, hidden_size=46, num_layers=3, num_heads=6, num_kv_heads=2,
                     head_dim=14, num_dense_layers=1, dense_size=38, num_experts=8,
                     experts_per_token=3, expert_size=22, context=97)
SIX = Sampling(max_tokens=6, stop_ids=())


def make_model():
    torch.manual_seed(13)
    model = Transformer(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def placements(world, redundant):
    """Another placement in each expert layer."""
    if not redundant:
        return [in_order(8, world.size)] * 2
    return [place_experts(load, world.size, redundant) for load in (range(1, 9), [9] + [1] * 7)]


def prompts_of(rank):
    """Some ranks have more to do than others; the second has nothing."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 271, (size,), generator=generator).tolist()
            for size in ([30, 4], [], [7], [17, 1, 9])[rank]]


@torch.inference_mode()
def one_forward(world, redundant):
    """The furthest that logits are from those of an undivided model; what was sent and run.

    All rows go through the first expert layer, and only those with wanted logits through the last.
    """
    alone, model = make_model(), make_model()
    runs = shard(model, placements(world, redundant))
    prompts = prompts_of(world.rank)
    far = 0.0
    if prompts:
        tokens = torch.tensor([token for prompt in prompts for token in prompt])
        batch = Batch(new=[len(prompt) for prompt in prompts])
        far = (model(tokens, batch) - alone(tokens, batch)).abs().max().item()
    else:
        take_part(model)
    slots = [layer.mlp.experts.down_proj.shape[0] for layer in model.layers
             if isinstance(layer.mlp, MoE)]
    return {"far": far, "rows": [sum(map(len, prompts)), len(prompts)], "slots": slots,
            "traffic": [vars(run.traffic) for run in runs]}


def generate(world, redundant):
    """The answers of this rank's engine, and how many steps all took."""
    model = make_model()
    shard(model, placements(world, redundant))
    limits = Limits(max_tokens_per_step=11 + world.rank)       # a chunk of a prompt wants no logits
    engine = Engine(model, PagedCache(CONFIG, 40, 5, dtype=torch.float64), limits, reuse=False)
    requests = [engine.submit(prompt, SIX) for prompt in prompts_of(world.rank)]
    num_steps = serve_together(engine)
    return [request.output for request in requests], num_steps


def rows_of_one_expert(world, _):
    """Each rank has one token, twice; both ranks have a copy of the expert that all want."""
    model = make_model()
    runs = shard(model, [Placement(((0, 1, 2, 3, 7), (0, 4, 5, 6, 7)))] * 2)
    experts = model.layers[-1].mlp.experts
    x = torch.ones(1, CONFIG.hidden_size, dtype=torch.float64)
    for _ in range(2):
        runs[1](x, torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.float64), experts)
    return runs[1].traffic.rows_run


def fail(world, _):
    """A placement for another number of ranks."""
    shard(make_model(), [in_order(8, 2 * world.size)] * 2)
