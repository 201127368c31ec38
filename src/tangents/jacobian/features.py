"""A batch's rows of J as features: which factors belong to which part of a parameter, and their columns, dense."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tangents.jacobian.factors import WORKSPACE, Factor, Lookup, Outer, chunks
from tangents.priors import BoundPrior, Weight

ROW_CHUNK = 4 * WORKSPACE  # bytes of one parameter's columns held at a time


class Features(Protocol):
    """A batch's rows of J: factors for the parameters that have them, and dense rows for all others."""

    n: int
    o: int

    @property
    def factors(self) -> Mapping[str, list[Factor]]: ...

    def generic_rows(self) -> dict[str, Tensor]:
        """Rows ``(n * o, size)`` of the parameters without factors."""
        ...


@dataclass(frozen=True)
class Segment:
    """A part of a parameter whose factors overlap no other's."""

    name: str
    start: int
    stop: int

    def of(self, block: Features) -> list[Factor]:
        found = block.factors.get(self.name, [])
        return [f for f in found if self.start <= f.start and f.start + f.size <= self.stop]


def segments(blocks: Sequence[Features], name: str, whole: int | None = None) -> list[Segment]:
    """A parameter cut where no factor of any block crosses (attention projects with thirds of one weight).

    ``whole``: the parameter's size, where it must not be cut.
    """
    if whole is not None:
        return [Segment(name, 0, whole)]
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted({f.span for b in blocks for f in b.factors.get(name, [])}):
        if merged and lo < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return [Segment(name, lo, hi) for lo, hi in merged]


def uncut(name: str, prior: BoundPrior) -> int | None:
    """The size of a parameter that a Kronecker prior weights: it acts on whole rows."""
    weight = prior.weights[name]
    return weight[0].shape[0] * weight[1].shape[0] if isinstance(weight, tuple) else None


def scale_rows(R: Tensor, prior: BoundPrior, name: str, lo: int = 0) -> Tensor:
    """Rows ``(m, columns from lo)`` of one parameter times a root of its prior."""
    root = prior.root(name, R.dtype)
    if isinstance(root, tuple):
        B, A = (m.to(R.device) for m in root)
        return torch.einsum("mbc,ba,cd->mad", R.reshape(-1, B.shape[0], A.shape[0]), B, A).reshape(R.shape)
    if isinstance(root, Tensor):
        return R * root[lo : lo + R.shape[1]].to(R.device)
    return R if root == 1 else R * root


def single_outers(segment: Segment, blocks: Sequence[Features]) -> list[Outer] | None:
    """Each block's factor where every block has one `Outer` for the whole segment."""
    found = [segment.of(b) for b in blocks]
    if all(len(f) == 1 and isinstance(f[0], Outer) for f in found):
        return [f[0] for f in found if isinstance(f[0], Outer)]
    return None


def only_lookups(segment: Segment, blocks: Sequence[Features]) -> bool:
    """Whether all factors read the same table, entry by entry."""
    return all(isinstance(f, Lookup) and f.span == (segment.start, segment.stop) for b in blocks for f in segment.of(b))


def rooted(f: Outer, rows: slice, dtype: torch.dtype, root: Weight) -> tuple[Tensor, Tensor, float]:
    a, g = f.left(rows, dtype), f.right(rows, dtype)
    if isinstance(root, tuple):
        first, rest = (m.to(a.device) for m in root)
        on_a, on_g = (first, rest) if f.flipped else (rest, first)
        return a @ on_a, g @ on_g, 1.0
    assert isinstance(root, float | int)
    return a, g, float(root) ** 2


def column_chunks(
    segment: Segment, blocks: Sequence[Features], bytes_each: int, prior: BoundPrior
) -> Iterator[tuple[int, int]]:
    """Column ranges that fit a bounded block at so many bytes a column, in whole units of every factor's width."""
    size = segment.stop - segment.start
    if isinstance(prior.weights[segment.name], tuple):
        yield 0, size
        return
    width = min(math.lcm(*(f.width for b in blocks for f in segment.of(b))), size)
    units = -(-size // width)
    for part in chunks(units, bytes_each * width, ROW_CHUNK):
        yield part.start * width, min(part.stop * width, size)


def write_columns(segment: Segment, lo: int, hi: int, prior: BoundPrior, block: Features, out: Tensor) -> None:
    """Columns ``[lo, hi)`` of a segment, times a root of the prior, into ``out``, ``(n * o, hi - lo)``."""
    found, generic = segment.of(block), block.generic_rows().get(segment.name)
    if generic is not None:
        out.copy_(generic[:, segment.start + lo : segment.start + hi])
    elif len(found) == 1 and (found[0].start, found[0].size) == (segment.start, segment.stop - segment.start):
        found[0].write_columns(lo, hi, out.unflatten(0, (block.n, block.o)))
    else:
        out.zero_()
        for f in found:
            shift = f.start - segment.start
            a, b = max(lo, shift), min(hi, shift + f.size)
            if a < b:
                out[:, a - lo : b - lo].add_(f.columns(a - shift, b - shift, out.dtype).reshape(-1, b - a))
    scaled = scale_rows(out, prior, segment.name, segment.start + lo)
    if scaled is not out:
        out.copy_(scaled)


def columns_of(segment: Segment, block: Features, lo: int, hi: int, prior: BoundPrior, dtype: torch.dtype) -> Tensor:
    out = torch.empty(block.n * block.o, hi - lo, dtype=dtype, device=device_of(block))
    write_columns(segment, lo, hi, prior, block, out)
    return out


def device_of(block: Features) -> torch.device:
    for factors in block.factors.values():
        for f in factors:
            return f.tensors()[0].device
    return next(iter(block.generic_rows().values())).device
