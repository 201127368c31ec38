"""The operations whose use of a parameter is known: one rule each, from an operation's arguments to its uses.

A rule has the signature of its operation after ``(capture, y)``, y being what came out; it records what it covers and
returns the tensors (parameters) that it covered. All else about a parameter's gradient follows from its uses.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from tangents.jacobian.patches import Window
from tangents.jacobian.uses import ConvolutionUse, LookupUse, MatrixUse, SumUse

if TYPE_CHECKING:
    from tangents.jacobian.capture import Capture

Covered = list[Tensor]


class NotCovered(Exception):
    """The operation is used in a way that its rule does not cover; the parameter is left to autodiff."""


def _sum_use(
    capture: "Capture", y: Tensor, w: Tensor | None, like: Any = None, times: Tensor | None = None, scale: float = 1
) -> Covered:
    view = capture.view(w)
    if w is None or view is None:
        return []
    if view.transposed:
        raise NotCovered("a transposed parameter, broadcast")
    times = None if times is None else capture.hold(times)
    capture.uses.append(
        SumUse(
            view.name, view.start, view.size, capture.edge(y), y.shape, _watch(times),
            like=tuple(w.shape if like is None else like), times=times, scale=scale,
        )
    )  # fmt: skip
    return [w]


def _matrix_use(
    capture: "Capture", y: Tensor, a: Tensor, w: Tensor, by_columns: bool, columns: bool = False
) -> Covered:
    """``by_columns``: the operation reads ``w`` as ``(out, in)``, as F.linear does, and not as ``(in, out)``."""
    view = capture.view(w)
    if view is None:
        return []
    a = capture.hold(a)
    capture.uses.append(
        MatrixUse(
            view.name, view.start, view.size, capture.edge(y), y.shape, _watch(a),
            a=a, flipped=view.transposed == by_columns, columns=columns,
        )
    )  # fmt: skip
    return [w]


def _watch(*tensors: Tensor | None) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in tensors if t is not None and not t.is_inference()]


def linear(capture: "Capture", y: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Covered:
    if weight.dim() != 2:
        raise NotCovered("a weight that is no matrix")
    return _matrix_use(capture, y, input, weight, True) + _sum_use(capture, y, bias)


def addmm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: None = None,
) -> Covered:
    a = mat1 if alpha == 1 else mat1 * alpha
    return _matrix_use(capture, y, a, mat2, False) + _sum_use(capture, y, input, scale=beta)


def matmul(capture: "Capture", y: Tensor, input: Tensor, other: Tensor, *, out: None = None) -> Covered:
    covered: list[Tensor] = []
    if other.dim() == 2 and input.dim() >= 2:
        covered += _matrix_use(capture, y, input, other, False)
    if input.dim() == 2 and other.dim() >= 2:
        covered += _matrix_use(capture, y, other, input, True, columns=True)
    return covered


def add(
    capture: "Capture", y: Tensor, input: Tensor, other: Tensor | float, *, alpha: float = 1, out: None = None
) -> Covered:
    covered = _sum_use(capture, y, input) if isinstance(input, Tensor) else []
    return covered + (_sum_use(capture, y, other, scale=alpha) if isinstance(other, Tensor) else [])


def sub(
    capture: "Capture", y: Tensor, input: Tensor, other: Tensor | float, *, alpha: float = 1, out: None = None
) -> Covered:
    covered = _sum_use(capture, y, input)
    return covered + (_sum_use(capture, y, other, scale=-alpha) if isinstance(other, Tensor) else [])


def mul(capture: "Capture", y: Tensor, input: Tensor, other: Tensor | float, *, out: None = None) -> Covered:
    if not isinstance(other, Tensor) or not isinstance(input, Tensor):
        raise NotCovered("a product with a number")
    return _sum_use(capture, y, input, times=other) + _sum_use(capture, y, other, times=input)


def expand(capture: "Capture", y: Tensor, input: Tensor, *_: Any, **__: Any) -> Covered:
    return _sum_use(capture, y, input)


def embedding(
    capture: "Capture", y: Tensor, index: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Covered:
    view = capture.view(weight)
    if view is None:
        return []
    if view.transposed:
        raise NotCovered("a transposed table")
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    each = index.detach().expand(y.shape[:-1])
    capture.uses.append(
        LookupUse(
            view.name, view.start, view.size, capture.edge(y), y.shape, _watch(index),
            index=each, width=weight.shape[1], padding=padding,
        )
    )  # fmt: skip
    return [weight]


def aten_embedding(
    capture: "Capture", y: Tensor, weight: Tensor, index: Tensor, padding_idx: int = -1, *_: Any
) -> Covered:
    return embedding(capture, y, index, weight, None if padding_idx < 0 else padding_idx)


def _normalised(
    capture: "Capture", y: Tensor, weight: Tensor | None, bias: Tensor | None, like: Any, x_hat: Callable[[], Tensor]
) -> Covered:
    covered = _sum_use(capture, y, bias, like)
    if capture.view(weight) is not None:
        covered += _sum_use(capture, y, weight, like, times=x_hat())
    return covered


def _channels(x: Tensor) -> tuple[int, ...]:
    return (x.shape[1], *(1,) * (x.dim() - 2))


def layer_norm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Covered:
    x = capture.hold(input)
    return _normalised(
        capture, y, weight, bias, normalized_shape, lambda: F.layer_norm(x, list(normalized_shape), None, None, eps)
    )


def rms_norm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Covered:
    x = capture.hold(input)
    return _normalised(
        capture, y, weight, None, normalized_shape, lambda: F.rms_norm(x, list(normalized_shape), None, eps)
    )


def group_norm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Covered:
    x = capture.hold(input)
    return _normalised(capture, y, weight, bias, _channels(input), lambda: F.group_norm(x, num_groups, None, None, eps))


def batch_norm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Covered:
    if training or running_mean is None or running_var is None:
        raise NotCovered("batch statistics")
    x = capture.hold(input)
    return _normalised(
        capture, y, weight, bias, _channels(input),
        lambda: F.batch_norm(x, running_mean, running_var, None, None, False, 0.0, eps),
    )  # fmt: skip


def aten_batch_norm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Covered:
    return batch_norm(capture, y, input, mean, var, weight, bias, training, momentum, eps)


def instance_norm(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Covered:
    x = capture.hold(input)
    stats = (None, None) if use_input_stats else (running_mean, running_var)
    return _normalised(
        capture, y, weight, bias, _channels(input),
        lambda: F.instance_norm(x, *stats, None, None, use_input_stats, 0.0, eps),
    )  # fmt: skip


def _convolution(dims: int) -> Callable[..., list[Tensor]]:
    def rule(
        capture: "Capture",
        y: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Covered:
        if input.dim() != dims + 2:
            raise NotCovered("an input without a batch dimension")
        window = Window.of_convolution(weight.shape[2:], stride, padding, dilation)
        return _convolution_use(capture, y, input, weight, bias, window, groups, False)

    return rule


def _transposed_convolution(dims: int) -> Callable[..., list[Tensor]]:
    def rule(
        capture: "Capture",
        y: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Covered:
        if input.dim() != dims + 2:
            raise NotCovered("an input without a batch dimension")
        window = Window.of_convolution(weight.shape[2:], stride, padding, dilation)
        return _convolution_use(capture, y, input, weight, bias, window, groups, True)

    return rule


def _convolution_use(
    capture: "Capture",
    y: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
    groups: int,
    transpose: bool,
) -> Covered:
    view = capture.view(weight)
    covered = _sum_use(capture, y, bias, _channels(y))
    if view is not None:
        if view.transposed:
            raise NotCovered("a transposed weight")
        a = capture.hold(input)
        capture.uses.append(
            ConvolutionUse(
                view.name, view.start, view.size, capture.edge(y), y.shape, _watch(a),
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
