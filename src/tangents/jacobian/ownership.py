"""Which input owns which row of a captured operation: found by gradients, never guessed from sizes.

An operation's batch may be folded (windows, tokens, time-major steps), permuted, routed by the data, or be no batch
at all (a table that all inputs share). Each row's owner is read off exactly: scale input i's cotangent by a power of
two that spells i, one digit a backward pass. Gradients are linear in the cotangent, and scaling by a power of two
rounds nothing, so row by row the gradient comes back scaled by its owner's digit, bit for bit. A row that comes back
otherwise belongs to several inputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BASE = 16  # digits 0 to 15: gradients scaled by up to 2^15 stay in the range of float32 and bfloat16

SKETCHED = 4  # numbers by which a row is recognised

NOBODY, SHARED = -1, -2


def owners(backward: Callable[[Tensor], Sequence[Tensor | None]], cotangent: Tensor) -> list[Tensor]:
    """For each operation the owner of each of its rows: an input's index, ``NOBODY`` (no gradient) or ``SHARED``.

    ``backward`` maps a cotangent ``(n, o)`` to each operation's gradient, cut into rows ``(R, ...)``.
    """
    n = cotangent.shape[0]
    base = [None if g is None else _sketch(g) for g in backward(cotangent)]
    result = [torch.zeros(0 if g is None else g.shape[0], dtype=torch.long, device=cotangent.device) for g in base]
    shared = [torch.zeros_like(r, dtype=torch.bool) for r in result]
    index = torch.arange(n, device=cotangent.device)
    for place in range(_digits(n)):
        digit = index // BASE**place % BASE
        coded = backward(cotangent * torch.exp2(digit.to(cotangent.dtype)).unsqueeze(1))
        for found, several, plain, scaled in zip(result, shared, base, coded, strict=True):
            if plain is not None and scaled is not None:
                value, clash = _digit(plain, _sketch(scaled))
                found += value * BASE**place
                several |= clash
    for found, several, plain in zip(result, shared, base, strict=True):
        if plain is not None:
            found[found >= n] = SHARED
            found[(plain == 0).all(1)] = NOBODY
            found[several] = SHARED
    return result


def _digits(n: int) -> int:
    return max(1, math.ceil(math.log(n, BASE) - 1e-12))


def _sketch(gradient: Tensor) -> Tensor:
    """A few random combinations of each row's entries: they scale as the row does, and are far fewer to look at."""
    matrix = gradient.flatten(1)
    matrix = matrix.float() if matrix.dtype in (torch.bfloat16, torch.float16) else matrix
    if matrix.shape[1] <= SKETCHED:
        return matrix
    mix = torch.randn(matrix.shape[1], SKETCHED, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return matrix @ mix.to(matrix)


def _digit(plain: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two between two gradients, row by row, and where there is none."""
    size = plain.abs().amax(1, keepdim=True)
    unit = torch.where(size > 0, size, 1)
    a, b = plain / unit, scaled / unit
    ratio = (a * b).sum(1) / (a * a).sum(1).clamp_min(torch.finfo(a.dtype).tiny)
    digit = ratio.clamp_min(2.0**-4).log2().round()
    rest = (b - a * torch.exp2(digit).unsqueeze(1)).abs().amax(1)
    tolerance = torch.finfo(a.dtype).eps ** 0.5  # exact on a CPU; a GPU may add in another order
    clash = (rest > tolerance * b.abs().amax(1)) | (digit < 0) | (digit >= BASE)
    clash &= (plain != 0).any(1) | (scaled != 0).any(1)
    return digit.clamp(0, BASE - 1).long(), clash


@dataclass(frozen=True)
class Layout:
    """How an operation's ``R`` rows sort by input: as a fold ``(before, n, after)``, or by an index with gaps."""

    n: int
    before: int = 1
    after: int = 1
    index: Tensor | None = None  # (n, T), into the rows; R where there is none
    certain: bool = True  # that rows without a gradient on this batch lie so too

    @classmethod
    def of(cls, owner: Tensor, n: int) -> "Layout":
        """The fold that agrees with every known owner, else the rows of each input, listed."""
        rows = owner.shape[0]
        known = owner >= 0
        position = torch.arange(rows, device=owner.device)
        if rows % n == 0:
            per_input = rows // n
            folds = [
                after
                for after in range(per_input, 0, -1)
                if per_input % after == 0
                and bool((position.div(after, rounding_mode="floor") % n == owner)[known].all())
            ]
            if folds:  # inputs first, where dead rows leave more than one
                return cls(n, per_input // folds[0], folds[0], certain=len(folds) == 1 or bool(known.all()))
        lists = [position[owner == i] for i in range(n)]
        longest = max(1, *(len(rows_of) for rows_of in lists)) if n > 1 else max(1, len(lists[0]))
        index = torch.full((n, longest), rows, dtype=torch.long, device=owner.device)
        for i, rows_of in enumerate(lists):
            index[i, : len(rows_of)] = rows_of
        return cls(n, index=index, certain=False)

    def gather(self, x: Tensor) -> Tensor:
        """Rows ``(R, ...)`` sorted by input ``(n, T, ...)``; gaps are zero."""
        if self.index is None:
            folded = x.reshape(self.before, self.n, self.after, *x.shape[1:])
            return folded.transpose(0, 1).reshape(self.n, self.before * self.after, *x.shape[1:])
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.index]
