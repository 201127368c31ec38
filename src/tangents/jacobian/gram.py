"""Kernel blocks and diagonals from factors: ``J S J'^T``, parameter by parameter, by the cheaper of two formulas.

- **positions**: ``K[ic, jd] = sum_tu (a_it . a'_ju) (g_ict . g'_jdu)``; its cost does not depend on the weights' count
- **rows**: form a bounded chunk of this parameter's columns, multiply, add, drop
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tangents.jacobian.factors import WORKSPACE, Factor, Lookup, Outer, Rows, chunks
from tangents.priors import BoundPrior, Weight

ROW_CHUNK = 4 * WORKSPACE  # bytes of one parameter's columns held at a time


class Features(Protocol):
    """A batch's rows of J: factors for the parameters that have them, and dense rows for all others."""

    n: int
    o: int
    factors: Mapping[str, list[Factor]]

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


def add_gram(K: Tensor, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior) -> None:
    """Add ``J S J'^T`` to K, in K's dtype. ``right=None`` means ``left``: then only K's lower tiles are filled."""
    both = [*left, *(right or [])]
    generic = _generic_names(left, right)
    done: set[str] = set()
    for name in prior.columns.names:
        if name in generic or name in done:
            continue
        weight = prior.weights[name]
        if isinstance(weight, float) and weight == 0:
            continue
        for segment in segments(both, name, _uncut(name, prior)):
            if _by_positions(segment, left, right, prior):
                done |= _add_by_positions(K, segment, left, right, prior)
            elif _is_lookup(segment, both) and isinstance(weight, float):
                _add_lookups(K, segment, left, right, weight)
            else:
                _add_by_rows(K, segment, left, right, prior)
    if generic:
        L = _generic_rows(left, generic, prior, K.dtype)
        add_product(K, L, None if right is None else _generic_rows(right, generic, prior, K.dtype))


def add_product(K: Tensor, L: Tensor, R: Tensor | None = None, alpha: float = 1.0) -> None:
    """``K += alpha L R^T``; for ``R = L`` (None) in panels that end at the diagonal, about half of the work."""
    if R is not None:
        K.addmm_(L, R.T, alpha=alpha)
        return
    m = L.shape[0]
    step = max(128, -(-m // 12))
    for i in range(0, m, step):
        j = min(i + step, m)
        K[i:j, :j].addmm_(L[i:j], L[:j].T, alpha=alpha)


def squared_norms(block: Features, prior: BoundPrior, dtype: torch.dtype) -> Tensor:
    """``diag(J S J^T)`` of one block, ``(n, o)``, without its other entries."""
    total = torch.zeros(block.n, block.o, dtype=dtype, device=_device(block))
    for name in prior.columns.names:
        for segment in segments([block], name, _uncut(name, prior)):
            total = total + _segment_norms(segment, block, prior, dtype)
    for name, rows in block.generic_rows().items():
        parts = [scale_rows(rows[part].to(dtype), prior, name) for part in chunks(rows.shape[0], rows.shape[1] * 8)]
        total = total + torch.cat([torch.linalg.vecdot(part, part) for part in parts]).view(block.n, block.o)
    return total


def _uncut(name: str, prior: BoundPrior) -> int | None:
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


# ------------------------------------------------------------------------------------------- which formula


def _single(segment: Segment, blocks: Sequence[Features]) -> list[Outer] | None:
    """Each block's factor where every block has one `Outer` for the whole segment."""
    found = [segment.of(b) for b in blocks]
    if all(len(f) == 1 and isinstance(f[0], Outer) for f in found):
        return [f[0] for f in found if isinstance(f[0], Outer)]
    return None


def _is_lookup(segment: Segment, blocks: Sequence[Features]) -> bool:
    return all(isinstance(f, Lookup) for b in blocks for f in segment.of(b))


def _by_positions(segment: Segment, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior) -> bool:
    """Whether the positions formula applies and counts fewer operations."""
    outers = _single(segment, [*left, *(right or [])])
    weight = prior.weights[segment.name]
    if outers is None or isinstance(weight, Tensor):
        return False
    f = outers[0]
    whole = dict(zip(prior.columns.names, prior.columns.sizes, strict=True))[segment.name]
    if isinstance(weight, tuple) and f.size != whole:
        return False
    T = max(outer.T for outer in outers)
    pairs = f.o * f.o * f.r
    # The sum over pairs of positions runs at memory speed, some ten times slower an operation.
    positions = T * T * (2 * f.q + 2 * pairs + 10 * f.o * f.o)
    n = sum(b.n for b in left)
    rows = 2 * f.o * f.o * f.size + 4 * f.o * T * f.size / max(n, 1)
    return positions <= rows


# ------------------------------------------------------------------------------------------- positions


def _add_by_positions(
    K: Tensor, segment: Segment, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior
) -> set[str]:
    """Returns the biases whose share was added too: the rows of a bias are g itself where T = 1."""
    scalar = isinstance(prior.weights[segment.name], float)
    bias = _companion(segment, [*left, *(right or [])], prior) if scalar else None
    for rows, block_l, columns, block_r in _block_pairs(left, right):
        x, y = segment.of(block_l)[0], segment.of(block_r)[0]
        assert isinstance(x, Outer) and isinstance(y, Outer)
        _add_pair(K[rows, columns], x, y, prior.root(segment.name, K.dtype), bias, x is y and right is None)
    return {bias[0]} if bias else set()


def _block_pairs(
    left: Sequence[Features], right: Sequence[Features] | None
) -> Iterator[tuple[slice, Features, slice, Features]]:
    for rows, block_l in _placed(left):
        for columns, block_r in _placed(left if right is None else right):
            if right is not None or columns.start <= rows.start:
                yield rows, block_l, columns, block_r


def _placed(blocks: Sequence[Features]) -> Iterator[tuple[slice, Features]]:
    start = 0
    for block in blocks:
        yield slice(start, start + block.n * block.o), block
        start += block.n * block.o


def _companion(segment: Segment, blocks: Sequence[Features], prior: BoundPrior) -> tuple[str, float] | None:
    for name in prior.columns.names:
        weight = prior.weights[name]
        if isinstance(weight, float) and all(_shares_rows(segment.of(b)[0], b.factors.get(name, [])) for b in blocks):
            return name, weight
    return None


def _shares_rows(outer: Factor, of_bias: list[Factor]) -> bool:
    if not isinstance(outer, Outer) or outer.T != 1 or outer.window is not None or len(of_bias) != 1:
        return False
    rows = of_bias[0]
    return isinstance(rows, Rows) and rows.start == 0 and rows.values.data_ptr() == outer.g.data_ptr() and (
        rows.values.numel() == outer.g.numel()
    )


def _add_pair(K: Tensor, x: Outer, y: Outer, root: Weight, bias: tuple[str, float] | None, symmetric: bool) -> None:
    """Add one pair of blocks, tile by tile."""
    grid = K.unflatten(0, (x.n, x.o)).unflatten(2, (y.n, y.o))
    item = K.element_size()
    per_pair = item * x.T * y.T * (1 + 2 * x.o * y.o)
    side = max(1, int((4 * WORKSPACE / per_pair) ** 0.5))
    for i in range(0, x.n, side):
        rows = slice(i, min(i + side, x.n))
        a, g, weight = _rooted(x, rows, K.dtype, root)
        for j in range(0, rows.stop if symmetric else y.n, side):
            columns = slice(j, min(j + side, y.n))
            b, h, _ = (a, g, weight) if symmetric and i == j else _rooted(y, columns, K.dtype, root)
            _add_tile(grid[rows, :, columns, :], a, g, b, h, weight, bias)


def _add_tile(
    K: Tensor, a: Tensor, g: Tensor, b: Tensor, h: Tensor, weight: float, bias: tuple[str, float] | None
) -> None:
    (n, T, q), (m, U, _), o, c, r = a.shape, b.shape, g.shape[1], h.shape[1], g.shape[3]
    inner = a.reshape(n * T, q) @ b.reshape(m * U, q).T
    if T == 1 and U == 1:
        outer = (g.reshape(n * o, r) @ h.reshape(m * c, r).T).view(n, o, m, c)
        inner = inner.mul_(weight).add_(bias[1]) if bias else inner.mul_(weight)
        K.addcmul_(outer, inner.view(n, 1, m, 1))
        return
    outer = (g.reshape(n * o * T, r) @ h.reshape(m * c * U, r).T).view(n, o, T, m, c, U)
    K.add_((outer * inner.view(n, 1, T, m, 1, U)).sum((2, 5)), alpha=weight)


def _rooted(f: Outer, rows: slice, dtype: torch.dtype, root: Weight) -> tuple[Tensor, Tensor, float]:
    a, g = f.left(rows, dtype), f.right(rows, dtype)
    if isinstance(root, tuple):
        first, rest = (m.to(a.device) for m in root)
        on_a, on_g = (first, rest) if f.flipped else (rest, first)
        return a @ on_a, g @ on_g, 1.0
    assert isinstance(root, float | int)
    return a, g, float(root) ** 2


# ------------------------------------------------------------------------------------------- rows


def _add_by_rows(
    K: Tensor, segment: Segment, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior
) -> None:
    for lo, hi in _column_chunks(segment, [*left, *(right or [])], K, prior):
        L = _columns(segment, left, lo, hi, prior, K.dtype)
        add_product(K, L, None if right is None else _columns(segment, right, lo, hi, prior, K.dtype))


def _column_chunks(
    segment: Segment, blocks: Sequence[Features], K: Tensor, prior: BoundPrior
) -> Iterator[tuple[int, int]]:
    """Column ranges whose rows fit a bounded block, in whole units of every factor's width."""
    size = segment.stop - segment.start
    if isinstance(prior.weights[segment.name], tuple):
        yield 0, size
        return
    width = max((f.width for b in blocks for f in segment.of(b)), default=1)
    units = -(-size // width)
    for part in chunks(units, K.element_size() * sum(b.n * b.o for b in blocks) * width, ROW_CHUNK):
        yield part.start * width, min(part.stop * width, size)


def _columns(
    segment: Segment, blocks: Sequence[Features], lo: int, hi: int, prior: BoundPrior, dtype: torch.dtype
) -> Tensor:
    """Columns ``[lo, hi)`` of a segment for all blocks, ``(rows, hi - lo)``, times a root of the prior."""
    parts = [_block_columns(segment, b, lo, hi, dtype) for b in blocks]
    R = parts[0] if len(parts) == 1 else torch.cat(parts)
    return scale_rows(R, prior, segment.name, segment.start + lo)


def _block_columns(segment: Segment, block: Features, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
    total: Tensor | None = None
    for f in segment.of(block):
        shift = f.start - segment.start
        a, b = max(lo, shift), min(hi, shift + f.size)
        if a >= b:
            continue
        values = f.columns(a - shift, b - shift, dtype)
        if (a, b) != (lo, hi):
            wide = values.new_zeros(block.n, block.o, hi - lo)
            wide[:, :, a - lo : b - lo] = values
            values = wide
        total = values if total is None else total + values
    if total is None:
        total = torch.zeros(block.n, block.o, hi - lo, dtype=dtype, device=_device(block))
    return total.reshape(block.n * block.o, hi - lo)


def _add_lookups(
    K: Tensor, segment: Segment, left: Sequence[Features], right: Sequence[Features] | None, weight: float
) -> None:
    """Tables by rows of those entries alone that both sides read."""
    chosen = _entries(segment, left)
    if right is not None:
        chosen = chosen[torch.isin(chosen, _entries(segment, right))]
    widths = [f.width for b in left for f in segment.of(b)]
    if not widths or len(chosen) == 0:
        return
    rows = K.shape[0] + (0 if right is None else K.shape[1])
    for part in chunks(len(chosen), K.element_size() * rows * widths[0], ROW_CHUNK):
        L = _entry_columns(segment, left, chosen[part], widths[0], K.dtype)
        R = None if right is None else _entry_columns(segment, right, chosen[part], widths[0], K.dtype)
        add_product(K, L, R, weight)


def _entries(segment: Segment, blocks: Sequence[Features]) -> Tensor:
    found = [f.index.reshape(-1) for b in blocks for f in segment.of(b) if isinstance(f, Lookup)]
    return torch.cat(found).unique() if found else torch.zeros(0, dtype=torch.long)


def _entry_columns(segment: Segment, blocks: Sequence[Features], chosen: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    parts = []
    for block in blocks:
        total = torch.zeros(block.n, block.o, len(chosen) * width, dtype=dtype, device=_device(block))
        for f in segment.of(block):
            if isinstance(f, Lookup):
                total += f.entry_columns(chosen, dtype)
        parts.append(total.reshape(block.n * block.o, -1))
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------- the generic way


def _generic_names(left: Sequence[Features], right: Sequence[Features] | None) -> list[str]:
    names: dict[str, None] = {}
    for block in [*left, *(right or [])]:
        names.update(dict.fromkeys(block.generic_rows()))
    return list(names)


def _generic_rows(blocks: Sequence[Features], names: list[str], prior: BoundPrior, dtype: torch.dtype) -> Tensor:
    sizes = dict(zip(prior.columns.names, prior.columns.sizes, strict=True))
    result = []
    for block in blocks:
        rows, parts = block.generic_rows(), []
        for name in names:
            found = rows.get(name)
            if found is None:  # another block's values sent this parameter the generic way; here it has factors
                found = _block_columns(Segment(name, 0, sizes[name]), block, 0, sizes[name], dtype)
            parts.append(scale_rows(found.to(dtype), prior, name))
        result.append(torch.cat(parts, 1))
    return torch.cat(result)


# ------------------------------------------------------------------------------------------- the diagonal


def _segment_norms(segment: Segment, block: Features, prior: BoundPrior, dtype: torch.dtype) -> Tensor:
    outers = _single(segment, [block])
    weight = prior.weights[segment.name]
    if outers and not isinstance(weight, Tensor):
        f = outers[0]
        separable = isinstance(weight, float) or f.size == weight[0].shape[0] * weight[1].shape[0]
        if separable and (f.T == 1 or f.T * (f.q + f.o * f.r) < f.o * f.size):
            return _norms_by_positions(f, prior.root(segment.name, dtype), dtype)
    if _is_lookup(segment, [block]) and isinstance(weight, float):
        norms = _lookup_norms([f for f in segment.of(block) if isinstance(f, Lookup)], dtype)
        return norms * weight
    total = torch.zeros(block.n, block.o, dtype=dtype, device=_device(block))
    for lo, hi in _column_chunks(segment, [block], total, prior):
        R = _columns(segment, [block], lo, hi, prior, dtype)
        total += torch.linalg.vecdot(R, R).reshape(block.n, block.o)
    return total


def _norms_by_positions(f: Outer, root: Weight, dtype: torch.dtype) -> Tensor:
    parts = []
    for rows in chunks(f.n, (f.T * f.T * (1 + 2 * f.o) + f.T * (f.q + f.o * f.r)) * 8):
        a, g, weight = _rooted(f, rows, dtype, root)
        if f.T == 1:
            parts.append(g.square().sum((2, 3)) * a.square().sum((1, 2)).unsqueeze(1) * weight)
        else:
            inner, outer = a @ a.transpose(1, 2), g @ g.transpose(2, 3)
            parts.append(torch.einsum("ncts,nts->nc", outer, inner) * weight)
    return torch.cat(parts)


def _lookup_norms(found: list[Lookup], dtype: torch.dtype) -> Tensor:
    """Positions that read the same entry add up before they are squared."""
    index = torch.cat([f.index for f in found], 1)
    g = torch.cat([f.g for f in found], 2)
    parts = []
    for rows in chunks(index.shape[0], (g.shape[1] * g.shape[2] * (g.shape[3] + 2 * g.shape[2])) * 8):
        h, same = g[rows].to(dtype), (index[rows].unsqueeze(2) == index[rows].unsqueeze(1)).to(dtype)
        parts.append(torch.einsum("ncts,nts->nc", h @ h.transpose(2, 3), same))
    return torch.cat(parts)


def _device(block: Features) -> torch.device:
    for factors in block.factors.values():
        for f in factors:
            return f.g.device if isinstance(f, Outer | Lookup) else f.values.device  # type: ignore[attr-defined]
    return next(iter(block.generic_rows().values())).device
