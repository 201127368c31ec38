"""What one use of a parameter leaves behind, and how its gradient becomes the parameter's (`factors.py`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tangents.jacobian.factors import Factor, Lookup, Outer, Rows
from tangents.jacobian.patches import Window


@dataclass(eq=False)
class Use:
    """One use of a part of a parameter: its operation's gradient edge and what is needed to turn the gradient there
    into the parameter's. The gradient is cut into rows; which input owns each is found out in `ownership.py`."""

    name: str
    start: int
    size: int
    edge: GradientEdge
    shape: torch.Size
    watched: list[tuple[Tensor, int]] = field(default_factory=list)

    def overwritten(self) -> bool:
        return any(tensor._version != version for tensor, version in self.watched)

    def rows(self, gradient: Tensor) -> Tensor:
        """The gradient ``(R, ...)`` at the operation's output, one row for each place that one input can own."""
        raise NotImplementedError

    def factor(self, gradient: Tensor, gather: Callable[[Tensor], Tensor]) -> Factor:
        """The factor from gathered gradients ``(n, o, T, ...)``; ``gather`` sorts rows ``(R, ...)`` by input."""
        raise NotImplementedError


@dataclass(eq=False)
class MatrixUse(Use):
    """``y = a W^T``: rows are all leading positions. ``flipped``: the parameter is stored as ``W^T``; ``columns``:
    the product was ``W a``, so positions are the last dimension."""

    a: Tensor = field(kw_only=True)
    flipped: bool = False
    columns: bool = False

    def rows(self, gradient: Tensor) -> Tensor:
        gradient = gradient.transpose(-1, -2) if self.columns else gradient
        return gradient.reshape(-1, gradient.shape[-1])

    def factor(self, gradient: Tensor, gather: Callable[[Tensor], Tensor]) -> Factor:
        a = self.a.transpose(-1, -2) if self.columns else self.a
        return Outer(self.start, gather(a.reshape(-1, a.shape[-1])), gradient, flipped=self.flipped)


@dataclass(eq=False)
class ConvolutionUse(Use):
    """Convolution, or its transpose: rows are the entries of the operation's batch dimension."""

    a: Tensor = field(kw_only=True)
    window: Window = field(kw_only=True)
    groups: int = 1
    transpose: bool = False

    def rows(self, gradient: Tensor) -> Tensor:
        return gradient

    def factor(self, gradient: Tensor, gather: Callable[[Tensor], Tensor]) -> Factor:
        a = gather(self.a)
        if self.groups > 1:
            return self._grouped(a, gradient)
        return Outer(self.start, a, gradient, flipped=self.transpose, window=self.window)

    def _grouped(self, a: Tensor, gradient: Tensor) -> Factor:
        """Each group is a small convolution of its own: their rows side by side."""
        parts = [
            Outer(0, a_part, g_part, flipped=self.transpose, window=self.window).rows()
            for a_part, g_part in zip(a.chunk(self.groups, 2), gradient.chunk(self.groups, 3), strict=True)
        ]
        return Rows(self.start, torch.cat(parts, -1))


@dataclass(eq=False)
class SumUse(Use):
    """``y = x * w`` or ``y = x + w`` with ``w`` broadcast: rows are the dimensions along which it is broadcast."""

    like: tuple[int, ...] = field(kw_only=True)  # w's shape, against the trailing dimensions of the output
    times: Tensor | None = None
    scale: float = 1

    def _split(self, x: Tensor) -> Tensor:
        shape = (1,) * (len(self.shape) - len(self.like)) + self.like
        spread = [d for d, size in enumerate(shape) if size == 1]
        kept = [d for d, size in enumerate(shape) if size != 1]
        rows, columns = (math.prod(self.shape[d] for d in dims) for dims in (spread, kept))
        return x.permute(spread + kept).reshape(rows, columns)

    def rows(self, gradient: Tensor) -> Tensor:
        return self._split(gradient)

    def reduce(self, gradient: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """One output's rows ``(n, size)``: what `factor` needs, summed early to save memory."""
        rows = self.rows(gradient)
        if self.times is not None:
            rows = rows * self._split(self.times.expand(self.shape))
        return gather(rows).sum(1) * self.scale

    def factor(self, gradient: Tensor, gather: Callable[[Tensor], Tensor]) -> Factor:
        return Rows(self.start, gradient)


@dataclass(eq=False)
class LookupUse(Use):
    """``y = w[index]``: rows are the positions of the index."""

    index: Tensor = field(kw_only=True)
    width: int = 1
    padding: int | None = None

    def rows(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1, self.width)

    def factor(self, gradient: Tensor, gather: Callable[[Tensor], Tensor]) -> Factor:
        index = gather(self.index.reshape(-1))
        if self.padding is not None:
            gradient = gradient * (index != self.padding).unsqueeze(-1).unsqueeze(1)
        return Lookup(self.start, index, gradient, entries=self.size // self.width)
