"""``K = J S J'^T``, the finite-width NTK at the trained network: products, blocks, diagonal, dense."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tangents.inputs import length
from tangents.jacobian.features import ROW_CHUNK
from tangents.jacobian.gram import add_gram
from tangents.jacobian.operator import Block, Jacobian, Operator
from tangents.precision import accumulator
from tangents.priors import BoundPrior, Prior, as_prior
from tangents.progress import track


class Kernel(Operator):
    """``K = J S J'^T`` between some inputs and themselves (symmetric) or others, ``(n * o, n' * o')``."""

    _name = "K"

    def __init__(self, left: Jacobian, right: Jacobian | None = None, prior: Prior | float | None = None) -> None:
        other = right or left
        if left.network.columns != other.network.columns:
            raise ValueError(
                "the two networks' chosen parameters differ in name or shape: a kernel between two networks needs the "
                "same architecture and the same params="
            )
        self.left, self.right = left, right
        self.prior: BoundPrior = as_prior(prior).bind(left.network.columns)
        self.shape = (left.shape[0], other.shape[0])
        self.dtype = torch.promote_types(left.dtype, other.dtype)
        self.device = left.device

    @property
    def symmetric(self) -> bool:
        return self.right is None

    @property
    def T(self) -> "Kernel":
        if self.right is None:
            return self
        twin = Kernel(self.right, self.left)
        twin.prior = self.prior
        return twin

    def _product(self, V: Tensor) -> Tensor:
        if self._by_tiles(V.shape[1]):
            return self._product_by_tiles(V)
        other = self.right or self.left
        return self.left._product(self.prior.apply(other.transposed_product(V)))

    def _explain_non_finite(self) -> None:
        for jacobian in (self.left, *([self.right] if self.right else [])):
            jacobian._explain_non_finite()

    def _by_tiles(self, k: int) -> bool:
        """Whether forming K tile by tile, and dropping the tiles, counts fewer operations than two products."""
        plan, other = self.left.plan, (self.right or self.left).plan
        if other.way != "factored" or not other.keep or self.left.inputs.requires_grad:
            return False
        return plan.tiles_are_cheaper(k, other.n, self.symmetric)

    def _product_by_tiles(self, V: Tensor) -> Tensor:
        total = V.new_zeros(self.shape[0], V.shape[1])
        for rows, columns, tile in self.blocks(V.dtype):
            total[rows] += tile @ V[columns]
            if self.symmetric and rows != columns:
                total[columns] += tile.T @ V[rows]
        return total

    def blocks(self, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles ``(rows, columns, values)``; of a symmetric kernel the lower ones only. K itself is never held."""
        dtype = dtype or accumulator(self.device)
        start = 0
        for block in self.left.blocks():
            rows = slice(start, start + block.n * block.o)
            start = rows.stop
            place = 0
            for other in (self.right or self.left).blocks():
                columns = slice(place, place + other.n * other.o)
                place = columns.stop
                same = self.symmetric and columns == rows
                tile = torch.zeros(
                    rows.stop - rows.start, columns.stop - columns.start, dtype=dtype, device=self.device
                )
                add_gram(tile, [block], None if same else [other], self.prior)
                yield rows, columns, mirror(tile) if same else tile
                if same:
                    break

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """K itself. In float64 unless asked otherwise, from the network's factors as they are: a solve with little
        noise under a large eigenvalue needs the digits."""
        dtype = dtype or accumulator(self.device)
        K = torch.zeros(self.shape, dtype=dtype, device=self.device)
        if self.left.inputs.requires_grad or (self.right is not None and self.right.inputs.requires_grad):
            add_gram(K, list(self.left.blocks()), list((self.right or self.left).blocks()), self.prior)
            return K
        left, right = self.left, self.right or self.left
        for rows, blocks in track(self._groups(left), -(-left.n // self._capacity(left)), "kernel"):
            if self.symmetric:
                add_gram(K[rows, rows], blocks, None, self.prior)
            for columns, partners in self._groups(right, rows.start if self.symmetric else right.shape[0]):
                add_gram(K[rows, columns], blocks, partners, self.prior)
        if not bool(torch.isfinite(K.sum())):
            self._explain_non_finite()
        return mirror(K) if self.symmetric else K

    def diagonal(self, dtype: torch.dtype | None = None) -> Tensor:
        """``diag(K)``, ``(n * o,)``, without K; in float64 unless asked otherwise."""
        if self.right is None:
            return self.left.row_norms_squared(self.prior, dtype)
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"a kernel of shape {self.shape} has no diagonal: use lin.kernel(X).diagonal()")
        size = max(1, int(ROW_CHUNK // (16 * self.left.o * self.left.shape[1])))
        parts, start = [], 0
        for batch, other in zip(self.left.inputs.batches(size), self.right.inputs.batches(size), strict=True):
            rows, others = (J.rows_of(b, start) for J, b in ((self.left, batch), (self.right, other)))
            parts.append(torch.linalg.vecdot(self.prior.apply(rows.T).T, others))
            start += length(batch)
        return torch.cat(parts).to(dtype or accumulator(self.device))

    def eigh(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """The k largest eigenvalues, descending, and their eigenvectors ``(n * o, k)``; all without ``k``.

        Exact, from the dense K in float64. Solvers that need products only come with ``linalg``.
        """
        if self.right is not None:
            raise ValueError("a kernel between two sets of inputs is not symmetric: eigh takes lin.kernel(X)")
        if k is not None and not 1 <= k <= self.shape[0]:
            raise ValueError(f"eigh(k) takes k from 1 to {self.shape[0]}, not {k}")
        values, vectors = torch.linalg.eigh(self.to_dense())
        values, vectors = values.flip(0), vectors.flip(1)
        return (values, vectors) if k is None else (values[:k], vectors[:, :k])

    # ------------------------------------------------------------------------------------------- groups

    @staticmethod
    def _capacity(jacobian: Jacobian) -> int:
        """How many inputs' rows are held at once: all where they are kept, else what a third of the memory holds."""
        plan = jacobian.plan
        if plan.once.fits and plan.once.way != "implicit":
            return plan.n
        each = plan.once.held / plan.n
        if plan.once.way == "implicit":
            each = plan.counts.outputs * plan.counts.parameters * plan.counts.item
        return max(1, min(plan.n, int(plan.limit / 3 // max(each, 1))))

    @classmethod
    def _groups(cls, jacobian: Jacobian, stop: int | None = None) -> Iterator[tuple[slice, list[Block]]]:
        """The blocks in groups that may be held together, with their place in K, before row ``stop``."""
        capacity, group, start = cls._capacity(jacobian), [], 0
        if stop == 0:
            return
        for block in jacobian.blocks(keep=False):
            group.append(block)
            stopped = start + sum(b.n * b.o for b in group)
            if sum(b.n for b in group) + block.n > capacity or stopped == jacobian.shape[0]:
                yield slice(start, stopped), group
                for done in group:
                    jacobian.done(done)
                group, start = [], stopped
            if stopped == stop:
                return


def mirror(K: Tensor, side: int = 1024) -> Tensor:
    """Fill the upper triangle from the lower one, in place."""
    for i in range(0, K.shape[0], side):
        j = min(i + side, K.shape[0])
        K[:i, i:j] = K[i:j, :i].T
        square = K[i:j, i:j]
        square.copy_(square.tril() + square.tril(-1).T)
    return K
