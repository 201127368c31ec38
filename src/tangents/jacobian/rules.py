"""The operations whose use of a parameter is known: one rule each, from an operation's arguments to its `Use`s.

A rule has the signature of its operation after ``(capture, result)``, records what it covers and returns the tensors
(parameters) that it covered. Everything else about a parameter's gradient follows from its uses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tangents.jacobian.factors import Factor, Lookup, Outer, Rows
from tangents.jacobian.patches import Window

if TYPE_CHECKING:
    from tangents.jacobian.capture import Capture


class NotCovered(Exception):
    """The operation is used in a way that its rule does not cover; the parameter is left to autodiff."""


@dataclass
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


@dataclass
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


@dataclass
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


@dataclass
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


@dataclass
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


# ---------------------------------------------------------------------------------------------------- the rules


def _sum_use(capture: "Capture", result: Tensor, w: Tensor | None, like: Any = None, times: Tensor | None = None, scale: float = 1) -> list[Tensor]:
    view = capture.view(w)
    if w is None or view is None:
        return []
    if view.transposed:
        raise NotCovered("a transposed parameter, broadcast")
    times = None if times is None else capture.hold(times)
    capture.uses.append(
        SumUse(
            view.name, view.start, view.size, capture.edge(result), result.shape, _watch(times),
            like=tuple(w.shape if like is None else like), times=times, scale=scale,
        )
    )  # fmt: skip
    return [w]


def _matrix_use(capture: "Capture", result: Tensor, a: Tensor, w: Tensor, by_columns: bool, columns: bool = False) -> list[Tensor]:
    """``by_columns``: the operation reads ``w`` as ``(out, in)``, as F.linear does, and not as ``(in, out)``."""
    view = capture.view(w)
    if view is None:
        return []
    a = capture.hold(a)
    capture.uses.append(
        MatrixUse(
            view.name, view.start, view.size, capture.edge(result), result.shape, _watch(a),
            a=a, flipped=view.transposed == by_columns, columns=columns,
        )
    )  # fmt: skip
    return [w]


def _watch(*tensors: Tensor | None) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in tensors if t is not None and not t.is_inference()]


def linear(capture: "Capture", result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    if weight.dim() != 2:
        raise NotCovered("a weight that is no matrix")
    return _matrix_use(capture, result, input, weight, True) + _sum_use(capture, result, bias)


def addmm(capture: "Capture", result: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: None = None) -> list[Tensor]:
    a = mat1 if alpha == 1 else mat1 * alpha
    return _matrix_use(capture, result, a, mat2, False) + _sum_use(capture, result, input, scale=beta)


def matmul(capture: "Capture", result: Tensor, input: Tensor, other: Tensor, *, out: None = None) -> list[Tensor]:
    covered: list[Tensor] = []
    if other.dim() == 2 and input.dim() >= 2:
        covered += _matrix_use(capture, result, input, other, False)
    if input.dim() == 2 and other.dim() >= 2:
        covered += _matrix_use(capture, result, other, input, True, columns=True)
    return covered


def add(capture: "Capture", result: Tensor, input: Tensor, other: Tensor | float, *, alpha: float = 1, out: None = None) -> list[Tensor]:
    covered = _sum_use(capture, result, input) if isinstance(input, Tensor) else []
    return covered + (_sum_use(capture, result, other, scale=alpha) if isinstance(other, Tensor) else [])


def sub(capture: "Capture", result: Tensor, input: Tensor, other: Tensor | float, *, alpha: float = 1, out: None = None) -> list[Tensor]:
    covered = _sum_use(capture, result, input)
    return covered + (_sum_use(capture, result, other, scale=-alpha) if isinstance(other, Tensor) else [])


def mul(capture: "Capture", result: Tensor, input: Tensor, other: Tensor | float, *, out: None = None) -> list[Tensor]:
    if not isinstance(other, Tensor) or not isinstance(input, Tensor):
        raise NotCovered("a product with a number")
    return _sum_use(capture, result, input, times=other) + _sum_use(capture, result, other, times=input)


def expand(capture: "Capture", result: Tensor, input: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return _sum_use(capture, result, input)


def embedding(capture: "Capture", result: Tensor, index: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> list[Tensor]:
    view = capture.view(weight)
    if view is None:
        return []
    if view.transposed:
        raise NotCovered("a transposed table")
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    each = index.detach().expand(result.shape[:-1])
    capture.uses.append(
        LookupUse(
            view.name, view.start, view.size, capture.edge(result), result.shape, _watch(index),
            index=each, width=weight.shape[1], padding=padding,
        )
    )  # fmt: skip
    return [weight]


def aten_embedding(capture: "Capture", result: Tensor, weight: Tensor, index: Tensor, padding_idx: int = -1, *_: Any) -> list[Tensor]:
    return embedding(capture, result, index, weight, None if padding_idx < 0 else padding_idx)


def _normalised(capture: "Capture", result: Tensor, weight: Tensor | None, bias: Tensor | None, like: Any, x_hat: Callable[[], Tensor]) -> list[Tensor]:
    covered = _sum_use(capture, result, bias, like)
    if capture.view(weight) is not None:
        covered += _sum_use(capture, result, weight, like, times=x_hat())
    return covered


def _channels(x: Tensor) -> tuple[int, ...]:
    return (x.shape[1], *(1,) * (x.dim() - 2))


def layer_norm(capture: "Capture", result: Tensor, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any) -> list[Tensor]:
    x = capture.hold(input)
    return _normalised(
        capture, result, weight, bias, normalized_shape, lambda: F.layer_norm(x, list(normalized_shape), None, None, eps)
    )


def rms_norm(capture: "Capture", result: Tensor, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> list[Tensor]:
    x = capture.hold(input)
    return _normalised(
        capture, result, weight, None, normalized_shape, lambda: F.rms_norm(x, list(normalized_shape), None, eps)
    )


def group_norm(capture: "Capture", result: Tensor, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any) -> list[Tensor]:
    x = capture.hold(input)
    return _normalised(
        capture, result, weight, bias, _channels(input), lambda: F.group_norm(x, num_groups, None, None, eps)
    )


def batch_norm(capture: "Capture", result: Tensor, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> list[Tensor]:
    if training or running_mean is None or running_var is None:
        raise NotCovered("batch statistics")
    x = capture.hold(input)
    return _normalised(
        capture, result, weight, bias, _channels(input),
        lambda: F.batch_norm(x, running_mean, running_var, None, None, False, 0.0, eps),
    )  # fmt: skip


def aten_batch_norm(capture: "Capture", result: Tensor, input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *_: Any) -> list[Tensor]:
    return batch_norm(capture, result, input, mean, var, weight, bias, training, momentum, eps)


def instance_norm(capture: "Capture", result: Tensor, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5) -> list[Tensor]:
    x = capture.hold(input)
    stats = (None, None) if use_input_stats else (running_mean, running_var)
    return _normalised(
        capture, result, weight, bias, _channels(input),
        lambda: F.instance_norm(x, *stats, None, None, use_input_stats, 0.0, eps),
    )  # fmt: skip


def _convolution(dims: int) -> Callable[..., list[Tensor]]:
    def rule(capture: "Capture", result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> list[Tensor]:
        if input.dim() != dims + 2:
            raise NotCovered("an input without a batch dimension")
        window = Window.of_convolution(weight.shape[2:], stride, padding, dilation)
        return _convolution_use(capture, result, input, weight, bias, window, groups, False)

    return rule


def _transposed_convolution(dims: int) -> Callable[..., list[Tensor]]:
    def rule(capture: "Capture", result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> list[Tensor]:
        if input.dim() != dims + 2:
            raise NotCovered("an input without a batch dimension")
        window = Window.of_convolution(weight.shape[2:], stride, padding, dilation)
        return _convolution_use(capture, result, input, weight, bias, window, groups, True)

    return rule


def _convolution_use(capture: "Capture", result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int, transpose: bool) -> list[Tensor]:
    view = capture.view(weight)
    covered = _sum_use(capture, result, bias, _channels(result))
    if view is not None:
        if view.transposed:
            raise NotCovered("a transposed weight")
        a = capture.hold(input)
        capture.uses.append(
            ConvolutionUse(
                view.name, view.start, view.size, capture.edge(result), result.shape, _watch(a),
                a=a, window=window, groups=groups, transpose=transpose,
            )
        )  # fmt: skip
        covered.append(weight)
    return covered


RULES: dict[str, Callable[..., list[Tensor]]] = {
    "linear": linear,
    "addmm": addmm,
    **dict.fromkeys(("matmul", "mm", "__matmul__"), matmul),
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__"), add),
    **dict.fromkeys(("sub", "sub_", "subtract", "__sub__", "__isub__"), sub),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), mul),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    "F.embedding": embedding,
    "embedding": aten_embedding,
    **dict.fromkeys(("F.layer_norm", "layer_norm"), layer_norm),
    **dict.fromkeys(("F.rms_norm", "rms_norm"), rms_norm),
    **dict.fromkeys(("F.group_norm", "group_norm"), group_norm),
    "F.batch_norm": batch_norm,
    "batch_norm": aten_batch_norm,
    "F.instance_norm": instance_norm,
    **{f"conv{d}d": _convolution(d) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _transposed_convolution(d) for d in (1, 2, 3)},
}
