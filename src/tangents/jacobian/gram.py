"""Kernel blocks and diagonals from factors: ``J S J'^T``, parameter by parameter, by the cheaper of two formulas.

- **positions**: ``K[ic, jd] = sum_tu (a_it . a'_ju) (g_ict . g'_jdu)``; its cost does not depend on the weights' count
- **rows**: form a bounded chunk of this parameter's columns, multiply, add, drop
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tangents.jacobian.factors import WORKSPACE, Factor, Lookup, Outer, Rows, chunks
from tangents.jacobian.features import (
    ROW_CHUNK,
    Features,
    Segment,
    block_columns,
    column_chunks,
    columns_of,
    device_of,
    only_lookups,
    rooted,
    scale_rows,
    segments,
    single_outers,
    uncut,
)
from tangents.priors import BoundPrior, Weight


def add_gram(K: Tensor, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior) -> None:
    """Add ``J S J'^T`` to K, in K's dtype. ``right=None`` means ``left``: then only K's lower tiles are filled."""
    both = [*left, *(right or [])]
    generic = _generic_names(both)
    rows = _RowProducts(K, both, symmetric=right is None)
    done: set[str] = set()
    for name in prior.columns.names:
        weight = prior.weights[name]
        if name in done or (isinstance(weight, float) and weight == 0):
            continue
        if name in generic:
            _add_generic(rows, name, left, right, prior)
            continue
        for segment in segments(both, name, uncut(name, prior)):
            if _by_positions(segment, left, right, prior):
                done |= _add_by_positions(K, segment, left, right, prior)
            elif only_lookups(segment, both) and isinstance(weight, float):
                _add_lookups(rows, segment, left, right, weight)
            else:
                _add_by_rows(rows, segment, left, right, prior)
    rows.multiply()


class _RowProducts:
    """Columns of J, of one parameter after another, multiplied as soon as they fill a bounded block: few products, and
    large ones, where the parameters are small and many."""

    def __init__(self, K: Tensor, blocks: Sequence[Features], symmetric: bool) -> None:
        self.K, self.symmetric = K, symmetric
        self.rows = sum(b.n * b.o for b in blocks)
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._bytes = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.K.dtype

    def chunks(self, columns: int, width: int = 1) -> Iterator[tuple[int, int]]:
        """Ranges of columns that fit a block, in multiples of ``width``."""
        for part in chunks(-(-columns // width), self.K.element_size() * self.rows * width, ROW_CHUNK):
            yield part.start * width, min(part.stop * width, columns)

    def add(self, L: Tensor, R: Tensor | None) -> None:
        self._left.append(L)
        if R is not None:
            self._right.append(R)
        self._bytes += self.rows * L.shape[1] * L.element_size()
        if self._bytes >= ROW_CHUNK // 2:
            self.multiply()

    def multiply(self) -> None:
        if self._left:
            add_product(self.K, _side_by_side(self._left), None if self.symmetric else _side_by_side(self._right))
        self._left, self._right, self._bytes = [], [], 0


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def add_product(K: Tensor, L: Tensor, R: Tensor | None = None) -> None:
    """``K += L R^T``; for ``R = L`` (None) in panels that end at the diagonal, about half of the work."""
    if R is not None:
        K.addmm_(L, R.T)
        return
    m = L.shape[0]
    step = max(128, -(-m // 16))
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
    return (
        isinstance(rows, Rows)
        and rows.start == 0
        and rows.values.data_ptr() == outer.g.data_ptr()
        and (rows.values.numel() == outer.g.numel())
    )


def _add_pair(K: Tensor, x: Outer, y: Outer, root: Weight, bias: tuple[str, float] | None, symmetric: bool) -> None:
    """Add one pair of blocks, tile by tile."""
    grid = K.unflatten(0, (x.n, x.o)).unflatten(2, (y.n, y.o))
    item = K.element_size()
    per_pair = item * x.T * y.T * (1 + 2 * x.o * y.o)
    side = max(1, int((4 * WORKSPACE / per_pair) ** 0.5))
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
        inner = inner.mul_(weight).add_(bias[1]) if bias else inner.mul_(weight)
        K.addcmul_(outer, inner.view(n, 1, m, 1))
        return
    outer = (g.reshape(n * o * T, r) @ h.reshape(m * c * U, r).T).view(n, o, T, m, c, U)
    K.add_((outer * inner.view(n, 1, T, m, 1, U)).sum((2, 5)), alpha=weight)


# ------------------------------------------------------------------------------------------- rows


def _add_by_rows(
    rows: _RowProducts,
    segment: Segment,
    left: Sequence[Features],
    right: Sequence[Features] | None,
    prior: BoundPrior,
) -> None:
    for lo, hi in column_chunks(segment, [*left, *(right or [])], rows.rows * rows.K.element_size(), prior):
        L = columns_of(segment, left, lo, hi, prior, rows.dtype)
        rows.add(L, None if right is None else columns_of(segment, right, lo, hi, prior, rows.dtype))


def _add_lookups(
    rows: _RowProducts, segment: Segment, left: Sequence[Features], right: Sequence[Features] | None, weight: float
) -> None:
    """Tables by rows of those entries alone that both sides read."""
    chosen = _entries(segment, left)
    if right is not None:
        chosen = chosen[torch.isin(chosen, _entries(segment, right))]
    widths = [f.width for b in left for f in segment.of(b)]
    if not widths or len(chosen) == 0:
        return
    for lo, hi in rows.chunks(len(chosen) * widths[0], widths[0]):
        part = chosen[lo // widths[0] : hi // widths[0]]
        L = _entry_columns(segment, left, part, widths[0], rows.dtype)
        R = None if right is None else _entry_columns(segment, right, part, widths[0], rows.dtype)
        rows.add(L if weight == 1 else L * weight**0.5, R if weight == 1 or R is None else R * weight**0.5)


def _entries(segment: Segment, blocks: Sequence[Features]) -> Tensor:
    found = [f.index.reshape(-1) for b in blocks for f in segment.of(b) if isinstance(f, Lookup)]
    return torch.cat(found).unique() if found else torch.zeros(0, dtype=torch.long)


def _entry_columns(
    segment: Segment, blocks: Sequence[Features], chosen: Tensor, width: int, dtype: torch.dtype
) -> Tensor:
    parts = []
    for block in blocks:
        total = torch.zeros(block.n, block.o, len(chosen) * width, dtype=dtype, device=device_of(block))
        for f in segment.of(block):
            if isinstance(f, Lookup):
                total += f.entry_columns(chosen, dtype)
        parts.append(total.reshape(block.n * block.o, -1))
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------- the generic way


def _generic_names(blocks: Sequence[Features]) -> set[str]:
    return {name for block in blocks for name in block.generic_rows()}


def _add_generic(
    rows: _RowProducts, name: str, left: Sequence[Features], right: Sequence[Features] | None, prior: BoundPrior
) -> None:
    size = dict(zip(prior.columns.names, prior.columns.sizes, strict=True))[name]
    for lo, hi in rows.chunks(size, size if uncut(name, prior) else 1):
        L = _generic_columns(left, name, lo, hi, prior, rows.dtype)
        rows.add(L, None if right is None else _generic_columns(right, name, lo, hi, prior, rows.dtype))


def _generic_columns(
    blocks: Sequence[Features], name: str, lo: int, hi: int, prior: BoundPrior, dtype: torch.dtype
) -> Tensor:
    parts = []
    for block in blocks:
        found = block.generic_rows().get(name)
        if found is None:  # another block's values sent this parameter the generic way; here it has factors
            parts.append(block_columns(Segment(name, 0, hi), block, lo, hi, dtype))
        else:
            parts.append(found[:, lo:hi].to(dtype))
    return scale_rows(parts[0] if len(parts) == 1 else torch.cat(parts), prior, name, lo)
