"""Which arithmetic is used, and how far apart two right answers may be in it."""

import torch
from torch import Tensor

# How far two ways to the same number may differ by rounding alone, relative to its size, in the roughest dtype that a
# network's parameters have. A network may compute partly in float32 whatever its parameters are.
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def rounding(dtype: torch.dtype) -> float:
    return ROUNDING.get(dtype, 1e-3)


def cancellation(dtype: torch.dtype) -> float:
    """What is left where numbers of size one cancel: below it a derivative is rounding beside the others."""
    return min(100 * torch.finfo(dtype).eps, 1e-2)


def accumulator(device: torch.device) -> torch.dtype:
    """The dtype that sums run in: float64, but on devices that have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(accumulator(tensor.device))
