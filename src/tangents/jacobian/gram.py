"""Kernel blocks and diagonals from factors: ``J S J'^T``, parameter by parameter, by the cheaper of two formulas.

- **positions**: ``K[ic, jd] = sum_tu (a_it . a'_ju) (g_ict . g'_jdu)``; its cost does not depend on the weights' count
- **rows**: form a bounded chunk of this parameter's columns, multiply, add, drop
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tangents.jacobian.factors import WORKSPACE, Factor, Lookup, Outer, Rows, chunks
from tangents.jacobian.features import (
    ROW_CHUNK,
    Features,
    Segment,
    column_chunks,
    device_of,
    only_lookups,
    rooted,
    segments,
    single_outers,
    uncut,
    write_columns,
)
from tangents.priors import BoundPrior, Weight


def add_gram(K: Tensor, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior) -> None:
    """Add ``J S J'^T`` to K, in K's dtype. ``right=None`` means ``left``: then only K's lower tiles are filled."""
    both = [*left, *(right or [])]
    generic = {name for block in both for name in block.generic_rows()}
    sizes = dict(zip(prior.columns.names, prior.columns.sizes, strict=True))
    rows = _RowProducts(K, left, right, prior)
    done: set[str] = set()
    for name in prior.columns.names:
        weight = prior.weights[name]
        if name in done or (isinstance(weight, float) and weight == 0):
            continue
        done.add(name)
        if name in generic:
            rows.add_columns(Segment(name, 0, sizes[name]))
            continue
        for segment in segments(both, name, uncut(name, prior)):
            if _by_positions(segment, left, right, prior):
                done |= _add_by_positions(K, segment, left, right, prior, done)
            elif only_lookups(segment, both) and isinstance(weight, float):
                rows.add_entries(segment, weight)
            else:
                rows.add_columns(segment)
    rows.multiply()


class _RowProducts:
    """Columns of J, of one parameter after another, side by side in a bounded buffer that is multiplied and emptied
    when it is full: few products, and large ones, where the parameters are small and many."""

    def __init__(
        self, K: Tensor, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior
    ) -> None:
        self.K, self.prior = K, prior
        self.sides = [left] if right is None else [left, right]
        self.bytes_each = K.element_size() * sum(b.n * b.o for side in self.sides for b in side)  # of a column
        self.capacity = max(1, min(ROW_CHUNK // self.bytes_each, prior.columns.total))
        self._buffers: list[Tensor] | None = None
        self._filled = 0

    def add_columns(self, segment: Segment) -> None:
        blocks = [b for side in self.sides for b in side]
        for lo, hi in column_chunks(segment, blocks, self.bytes_each, self.prior):
            self._add(hi - lo, functools.partial(write_columns, segment, lo, hi, self.prior))

    def add_entries(self, segment: Segment, weight: float) -> None:
        """Of a table, the entries alone that both sides read."""
        chosen = _entries(segment, self.sides[0])
        if len(self.sides) > 1:
            chosen = chosen[torch.isin(chosen, _entries(segment, self.sides[1]))]
        width = max((f.width for b in self.sides[0] for f in segment.of(b)), default=0)
        for part in chunks(len(chosen), self.bytes_each * max(width, 1), ROW_CHUNK):
            entries = chosen[part]
            self._add(len(entries) * width, functools.partial(_write_entries, segment, entries, weight))

    def _add(self, width: int, write: Callable[[Features, Tensor], None]) -> None:
        """Let every block write its rows of the next columns."""
        if self._filled + width > self.capacity:
            self.multiply()
        if self._buffers is None or self._buffers[0].shape[1] < width:
            columns = max(self.capacity, width)
            self._buffers = [self.K.new_empty(sum(b.n * b.o for b in side), columns) for side in self.sides]
        for side, buffer in zip(self.sides, self._buffers, strict=True):
            for rows, block in _placed(side):
                write(block, buffer[rows, self._filled : self._filled + width])
        self._filled += width

    def multiply(self) -> None:
        if self._buffers is not None and self._filled:
            used = [buffer[:, : self._filled] for buffer in self._buffers]
            add_product(self.K, used[0], used[1] if len(used) > 1 else None)
            if any(buffer.requires_grad for buffer in self._buffers):
                self._buffers = None  # autodiff keeps them
        self._filled = 0


def add_product(K: Tensor, L: Tensor, R: Tensor | None = None) -> None:
    """``K += L R^T``; for ``R = L`` (None) in panels that end at the diagonal, about half of the work."""
    if R is not None:
        K.addmm_(L, R.T)
        return
    m = L.shape[0]
    step = max(128, -(-m // 8))
    for i in range(0, m, step):
        j = min(i + step, m)
        K[i:j, :j].addmm_(L[i:j], L[:j].T)


# ------------------------------------------------------------------------------------------- which formula


def _by_positions(
    segment: Segment, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior
) -> bool:
    """Whether the positions formula applies and counts fewer operations."""
    outers = single_outers(segment, [*left, *(right or [])])
    weight = prior.weights[segment.name]
    if outers is None or isinstance(weight, Tensor):
        return False
    f = outers[0]
    whole = dict(zip(prior.columns.names, prior.columns.sizes, strict=True))[segment.name]
    if isinstance(weight, tuple) and f.size != whole:
        return False
    return positions_are_cheaper(f, max(outer.T for outer in outers), sum(b.n for b in left))


def positions_are_cheaper(f: Outer, T: int, n: int) -> bool:
    """Operations of one pair of inputs by either formula, for T positions and n inputs on the left. The sum over pairs
    of positions runs at memory speed, some ten times slower an operation."""
    positions = T * T * (2 * f.q + 2 * f.o * f.o * f.r + 10 * f.o * f.o)
    rows = 2 * f.o * f.o * f.size + 4 * f.o * T * f.size / max(n, 1)
    return positions <= rows


# ------------------------------------------------------------------------------------------- positions


def _add_by_positions(
    K: Tensor,
    segment: Segment,
    left: Sequence[Features],
    right: Sequence[Features] | None,
    prior: BoundPrior,
    done: set[str],
) -> set[str]:
    """Returns the biases whose share was added too: the rows of a bias are g itself where T = 1."""
    scalar = isinstance(prior.weights[segment.name], float)
    bias = _companion(segment, [*left, *(right or [])], prior, done) if scalar else None
    for rows, block_l, columns, block_r in _block_pairs(left, right):
        (x,), (y,) = single_outers(segment, [block_l]) or [], single_outers(segment, [block_r]) or []
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


def _companion(
    segment: Segment, blocks: Sequence[Features], prior: BoundPrior, done: set[str]
) -> tuple[str, float] | None:
    for name in prior.columns.names:
        weight = prior.weights[name]
        if (
            name not in done
            and isinstance(weight, float)
            and all(_shares_rows(segment.of(b)[0], b.factors.get(name, [])) for b in blocks)
        ):
            return name, weight
    return None


def _shares_rows(outer: Factor, of_bias: list[Factor]) -> bool:
    if not isinstance(outer, Outer) or outer.T != 1 or outer.window is not None or len(of_bias) != 1:
        return False
    rows = of_bias[0]
    return (
        isinstance(rows, Rows)
        and rows.start == 0
        and rows.values.data_ptr() == outer.g.data_ptr()
        and (rows.values.numel() == outer.g.numel())
    )


def _add_pair(K: Tensor, x: Outer, y: Outer, root: Weight, bias: tuple[str, float] | None, symmetric: bool) -> None:
    """Add one pair of blocks, tile by tile."""
    grid = K.unflatten(0, (x.n, x.o)).unflatten(2, (y.n, y.o))
    item, most = K.element_size(), max(x.n, y.n)
    per_pair = item * x.T * y.T * (1 + 2 * x.o * y.o)
    side = max(1, int((4 * WORKSPACE / per_pair) ** 0.5))
    if symmetric:  # what a tile has above the diagonal is for nothing; but small tiles leave a GPU idle
        side = min(side, max(2048 if K.device.type == "cuda" else 128, -(-most // 8)))
    for i in range(0, x.n, side):
        rows = slice(i, min(i + side, x.n))
        a, g, weight = rooted(x, rows, K.dtype, root)
        for j in range(0, rows.stop if symmetric else y.n, side):
            columns = slice(j, min(j + side, y.n))
            b, h, _ = (a, g, weight) if symmetric and i == j else rooted(y, columns, K.dtype, root)
            _add_tile(grid[rows, :, columns, :], a, g, b, h, weight, bias)


def _add_tile(
    K: Tensor, a: Tensor, g: Tensor, b: Tensor, h: Tensor, weight: float, bias: tuple[str, float] | None
) -> None:
    (n, T, q), (m, U, _), o, c, r = a.shape, b.shape, g.shape[1], h.shape[1], g.shape[3]
    inner = a.reshape(n * T, q) @ b.reshape(m * U, q).T
    if T == 1 and U == 1:
        outer = (g.reshape(n * o, r) @ h.reshape(m * c, r).T).view(n, o, m, c)
        inner = inner if weight == 1 else inner * weight
        inner = inner + bias[1] if bias else inner
        K.addcmul_(outer, inner.view(n, 1, m, 1))
        return
    outer = (g.reshape(n * o * T, r) @ h.reshape(m * c * U, r).T).view(n, o, T, m, c, U)
    K.add_((outer * inner.view(n, 1, T, m, 1, U)).sum((2, 5)), alpha=weight)


# ------------------------------------------------------------------------------------------- tables


def _entries(segment: Segment, blocks: Sequence[Features]) -> Tensor:
    found = [f.index.reshape(-1) for b in blocks for f in segment.of(b) if isinstance(f, Lookup)]
    return torch.cat(found).unique() if found else torch.zeros(0, dtype=torch.long, device=device_of(blocks[0]))


def _write_entries(segment: Segment, entries: Tensor, weight: float, block: Features, out: Tensor) -> None:
    found = [f for f in segment.of(block) if isinstance(f, Lookup)]
    if not found:
        out.zero_()
    for k, f in enumerate(found):
        values = f.entry_columns(entries, out.dtype).reshape(out.shape) * weight**0.5
        out.copy_(values) if k == 0 else out.add_(values)
