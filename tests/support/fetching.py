"""Single experts out of a whole model in memory, as from a checkpoint."""

from minimodel.cluster.experts import FetchExpert
from minimodel.model.transformer import Transformer


def fetcher(model: Transformer) -> FetchExpert:
    experts = [layer.experts for layer in model.moe_layers()]
    matrices = [(each.gate_up_proj.data, each.down_proj.data) for each in experts]
    return lambda layer, expert: tuple(stack[expert] for stack in matrices[layer])
