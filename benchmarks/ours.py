"""Our side of every benchmark: the calls that a user would write, and the peak memory that the plan states for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def kernel_product(model: nn.Module, X: Any, u: Tensor) -> Callable[[], Tensor]:
    """The kernel is made once (its factors are captured at the first product) and multiplied again and again."""
    import tangents

    K = tangents.linearize(model).kernel(X)
    return lambda: K @ u


def dense_kernel(model: nn.Module, X: Any, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Only linearising is done once: every call captures anew and forms the whole matrix."""
    import tangents

    lin = tangents.linearize(model)
    return lambda: lin.kernel(X).to_dense(dtype=dtype)


def kernel_diagonal(model: nn.Module, X: Any, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Only linearising is done once: every call captures anew."""
    import tangents

    lin = tangents.linearize(model)
    return lambda: lin.kernel(X).diagonal(dtype)


def fisher_product(model: nn.Module, X: Any, v: Tensor, **how: Any) -> Callable[[], Tensor]:
    """The Fisher information is made once; products with it repeat on the same data."""
    import tangents

    F = tangents.linearize(model).fisher(X, "categorical", **how)
    return lambda: F @ v


def stated_peak(model: nn.Module, X: Any, job: str, dtype: torch.dtype = torch.float64, columns: int = 1) -> int | None:
    """The peak in bytes that the plan states for "product", "gram", "diagonal" or "fisher"."""
    import tangents

    return tangents.linearize(model).jacobian(X).plan.peak_bytes(job, dtype, columns)
