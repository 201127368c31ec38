"""Convolutions as matrix products: the patches of an input that each output position sees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """What one position of a convolution sees, in each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]  # padding in front
    after: tuple[int, ...]  # padding behind
    dilation: tuple[int, ...]

    @classmethod
    def of_convolution(cls, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> "Window":
        """From a convolution's arguments: numbers, sequences, or the paddings 'valid' and 'same'."""
        dims = len(kernel)
        stride, dilation = _each(stride, dims), _each(dilation, dims)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            before = tuple(t // 2 for t in total)
            return cls(
                tuple(kernel), stride, before, tuple(t - b for t, b in zip(total, before, strict=True)), dilation
            )
        padding = (0,) * dims if padding == "valid" else _each(padding, dims)
        return cls(tuple(kernel), stride, padding, padding, dilation)

    @property
    def pointwise(self) -> bool:
        """Each position sees itself alone."""
        return (
            all(k == 1 for k in self.kernel) and all(s == 1 for s in self.stride) and not any(self.before + self.after)
        )

    @property
    def places(self) -> int:
        return math.prod(self.kernel)

    def patches(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """``x`` of shape ``(b, channels, *space)`` as ``(b, prod(positions), channels * places)``."""
        if self.pointwise:
            return x.flatten(2).transpose(1, 2)
        pads = [p for pair in zip(reversed(self.before), reversed(self.after), strict=True) for p in pair]
        # What the stride leaves over at the end is cut; what a transposed convolution's output padding lacks is added.
        reach = [
            (t - 1) * s + d * (k - 1) + 1
            for t, s, d, k in zip(positions, self.stride, self.dilation, self.kernel, strict=True)
        ]
        missing = [
            r - (size + b + a) for r, size, b, a in zip(reach, x.shape[2:], self.before, self.after, strict=True)
        ]
        for d, extra in enumerate(reversed(missing)):
            pads[2 * d + 1] += max(extra, 0)
        x = F.pad(x, pads) if any(pads) else x.contiguous()
        step = x.stride()
        view = x.as_strided(
            (x.shape[0], x.shape[1], *self.kernel, *positions),
            (step[0], step[1], *(s * d for s, d in zip(step[2:], self.dilation, strict=True)),
             *(s * d for s, d in zip(step[2:], self.stride, strict=True))),
        )  # fmt: skip
        return view.reshape(x.shape[0], x.shape[1] * self.places, math.prod(positions)).transpose(1, 2)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(int(v) for v in value) if isinstance(value, Sequence | torch.Size) else (int(value),) * dims
    return values * dims if len(values) == 1 else values
