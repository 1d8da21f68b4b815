"""RMSNorm: vectors of one length, so that what follows sees directions."""

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Divide by the root mean square, scale by a learned weight (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(precise, x.shape[-1:], self.weight.to(precise), self.eps).to(x.dtype)
