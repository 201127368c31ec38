"""What is kept of the Jacobian with respect to one parameter: a few small tensors in place of its rows.

A factor stands for rows ``J[i, c]`` (input i, output c) over a contiguous part ``[start, start + size)`` of one
flattened parameter. All have the same four products, and count their own costs:

- ``jvp(V)``: ``(P, k) -> (n, o, k)``       - ``columns(lo, hi)``: the rows' entries ``[lo, hi)``, dense
- ``vjp(U)``: ``(n, o, k) -> (size, k)``    - ``nbytes``, ``row_operations()``, ``product_operations(k)``
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tangents.jacobian.patches import Window

WORKSPACE = 64 * 2**20  # bytes of scratch for a blocked product: large enough for full speed, small beside the data


def chunks(count: int, bytes_each: float, limit: int = WORKSPACE) -> Iterator[slice]:
    """Slices of ``range(count)`` whose scratch fits the limit."""
    step = max(1, min(count, int(limit // max(bytes_each, 1))))
    return (slice(i, min(i + step, count)) for i in range(0, count, step))


@dataclass(eq=False)
class Factor:
    """The rows with respect to entries ``[start, start + size)`` of one parameter."""

    start: int

    n: int = field(init=False)
    o: int = field(init=False)
    size: int = field(init=False)
    width: int = field(init=False, default=1)  # `columns` takes multiples of this

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.start + self.size

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def jvp(self, V: Tensor) -> Tensor:
        raise NotImplementedError

    def vjp(self, U: Tensor) -> Tensor:
        raise NotImplementedError

    def columns(self, lo: int, hi: int, dtype: torch.dtype | None = None) -> Tensor:
        raise NotImplementedError

    def write_columns(self, lo: int, hi: int, out: Tensor) -> None:
        """The same into ``out``, ``(n, o, hi - lo)``."""
        out.copy_(self.columns(lo, hi, out.dtype))

    def rows(self) -> Tensor:
        """All columns ``(n, o, size)``."""
        return self.columns(0, self.size)

    def row_operations(self) -> float:
        """Operations to form all rows."""
        raise NotImplementedError

    def product_operations(self) -> float:
        """Operations of one jvp or vjp with one vector."""
        raise NotImplementedError

    def part(self, V: Tensor) -> Tensor:
        return V[self.start : self.start + self.size]


@dataclass(eq=False)
class Rows(Factor):
    """The rows themselves ``(n, o, size)``, for small parameters."""

    values: Tensor

    def __post_init__(self) -> None:
        self.n, self.o, self.size = self.values.shape

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def jvp(self, V: Tensor) -> Tensor:
        V = self.part(V)
        return (self.values.to(V.dtype).reshape(-1, self.size) @ V).reshape(self.n, self.o, -1)

    def vjp(self, U: Tensor) -> Tensor:
        return self.values.to(U.dtype).reshape(-1, self.size).T @ U.reshape(self.n * self.o, -1)

    def columns(self, lo: int, hi: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.values[:, :, lo:hi].to(dtype or self.values.dtype)

    def write_columns(self, lo: int, hi: int, out: Tensor) -> None:
        out.copy_(self.values[:, :, lo:hi])

    def row_operations(self) -> float:
        return 0.0

    def product_operations(self) -> float:
        return 2.0 * self.values.numel()


@dataclass(eq=False)
class Outer(Factor):
    """``J[i, c] = sum_t g[i, c, t] a[i, t]^T``, an ``(r, q)`` matrix, for a weight used at positions t.

    ``a`` is ``(n, T, q)`` and ``g`` is ``(n, o, T, r)``. With a ``window`` both are images, ``(n, T, channels,
    *space)``, that are cut into patches when they are multiplied: ``a`` for a convolution, ``g`` for its transpose,
    whose weight is also stored ``flipped``, as ``(q, r)``.
    """

    a: Tensor
    g: Tensor
    flipped: bool = False
    window: Window | None = None

    def __post_init__(self) -> None:
        self.n, self.o = self.g.shape[:2]
        places = self.window.places if self.window else 1
        self.q = self.a.shape[2] * (1 if self.flipped else places)
        self.r = self.g.shape[3] * (places if self.flipped else 1)
        space = (self.a if self.flipped else self.g).shape[3 if self.flipped else 4 :] if self.window else ()
        self.T = self.a.shape[1] * int(torch.Size(space).numel())
        self.space = tuple(space)
        self.size = self.q * self.r
        self.width = self.r if self.flipped else self.q

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.g

    def left(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """``a`` of some inputs as ``(b, T, q)``."""
        a = self.a[rows].to(dtype)
        if self.window is None:
            return a
        b, t = a.shape[:2]
        flat = a.reshape(b * t, *a.shape[2:])
        flat = flat.flatten(2).transpose(1, 2) if self.flipped else self.window.patches(flat, self.space)
        return flat.reshape(b, self.T, self.q)

    def right(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """``g`` of some inputs as ``(b, o, T, r)``."""
        g = self.g[rows].to(dtype)
        if self.window is None:
            return g
        b, o, t = g.shape[:3]
        flat = g.reshape(b * o * t, *g.shape[3:])
        flat = self.window.patches(flat, self.space) if self.flipped else flat.flatten(2).transpose(1, 2)
        return flat.reshape(b, o, self.T, self.r)

    def _matrices(self, V: Tensor) -> Tensor:
        """Columns of V as matrices ``(q, r, k)``."""
        V = self.part(V)
        return V.reshape(self.q, self.r, -1) if self.flipped else V.reshape(self.r, self.q, -1).transpose(0, 1)

    def by_rows(self, k: int) -> bool:
        """Whether products with k vectors are cheaper from the formed rows."""
        return self.o * (self.T + k) < self.T * k

    def jvp(self, V: Tensor) -> Tensor:
        k = V.shape[1]
        out = V.new_empty(self.n, self.o, k)
        if self.by_rows(k):
            for rows, dense in self._row_blocks(V.dtype):
                out[rows] = (dense.reshape(-1, self.size) @ self.part(V)).reshape(-1, self.o, k)
            return out
        W = self._matrices(V).reshape(self.q, self.r * k)
        item = V.element_size()
        for rows in chunks(self.n, item * self.T * (self.r * (k + self.o) + self.q)):
            y = (self.left(rows, V.dtype).reshape(-1, self.q) @ W).reshape(-1, self.T, self.r, k)
            g = self.right(rows, V.dtype)
            if k == 1:
                out[rows] = torch.einsum("bctr,btr->bc", g, y.squeeze(-1)).unsqueeze(-1)
            else:
                out[rows] = torch.einsum("bctr,btrk->bck", g, y)
        return out

    def vjp(self, U: Tensor) -> Tensor:
        k = U.shape[2]
        if self.by_rows(k):
            total = U.new_zeros(self.size, k)
            for rows, dense in self._row_blocks(U.dtype):
                total += dense.reshape(-1, self.size).T @ U[rows].reshape(-1, k)
            return total
        total = U.new_zeros(self.r * k, self.q)
        item = U.element_size()
        for rows in chunks(self.n, item * self.T * (self.r * (k + self.o) + self.q)):
            m = torch.einsum("bctr,bck->btrk", self.right(rows, U.dtype), U[rows])
            total += m.reshape(-1, self.r * k).T @ self.left(rows, U.dtype).reshape(-1, self.q)
        shaped = total.reshape(self.r, k, self.q)
        return shaped.permute(2, 0, 1).reshape(-1, k) if self.flipped else shaped.permute(0, 2, 1).reshape(-1, k)

    def _row_blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        for rows in chunks(self.n, torch.finfo(dtype).bits // 8 * self.o * self.size):
            yield rows, self._columns(rows, 0, self.size, dtype)

    def _columns(self, rows: slice, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        a, g = self.left(rows, dtype), self.right(rows, dtype)
        lo, hi = lo // self.width, hi // self.width
        b = a.shape[0]
        if self.flipped:  # (q, r): a chunk of q
            a = a[:, :, lo:hi]
            return torch.einsum("btq,bctr->bcqr", a, g).reshape(b, self.o, -1)
        g = g[..., lo:hi].transpose(2, 3).reshape(b, self.o * (hi - lo), self.T)
        return torch.bmm(g, a).reshape(b, self.o, -1)

    def columns(self, lo: int, hi: int, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(self.n, self.o, hi - lo, dtype=dtype or self.g.dtype, device=self.g.device)
        self.write_columns(lo, hi, out)
        return out

    def write_columns(self, lo: int, hi: int, out: Tensor) -> None:
        direct = not self.flipped and hi - lo == self.size and out.is_contiguous()
        for rows in chunks(self.n, out.element_size() * self.T * (self.q + self.o * self.r)):
            if direct and not (self.a.requires_grad or self.g.requires_grad):
                a, g = self.left(rows, out.dtype), self.right(rows, out.dtype).transpose(2, 3)
                b = a.shape[0]
                torch.bmm(g.reshape(b, self.o * self.r, self.T), a, out=out[rows].view(b, self.o * self.r, self.q))
            else:
                out[rows] = self._columns(rows, lo, hi, out.dtype)

    def row_operations(self) -> float:
        return 2.0 * self.n * self.o * self.T * self.size

    def product_operations(self) -> float:
        return 2.0 * self.n * self.T * (self.size + self.o * self.r)

    def narrowed(self) -> "Factor":
        """The rows in place of the factors where they are smaller: many positions, few weights."""
        item = self.g.element_size()
        if self.n * self.o * self.size * item < self.nbytes and self.T > 1:
            return Rows(self.start, self.rows())
        return self


@dataclass(eq=False)
class Lookup(Factor):
    """``J[i, c][index[i, t]] += g[i, c, t]``, for a table ``(entries, width)`` read at ``index``."""

    index: Tensor
    g: Tensor
    entries: int

    def __post_init__(self) -> None:
        self.n, self.o, self.T, self.width = self.g.shape
        self.size = self.entries * self.width

    def tensors(self) -> tuple[Tensor, ...]:
        return self.index, self.g

    def jvp(self, V: Tensor) -> Tensor:
        k = V.shape[1]
        table = self.part(V).reshape(self.entries, self.width, k)
        out = V.new_empty(self.n, self.o, k)
        for rows in chunks(self.n, V.element_size() * self.T * self.width * (k + self.o)):
            out[rows] = torch.einsum("bctd,btdk->bck", self.g[rows].to(V.dtype), table[self.index[rows]])
        return out

    def vjp(self, U: Tensor) -> Tensor:
        k = U.shape[2]
        total = U.new_zeros(self.entries, self.width, k)
        for rows in chunks(self.n, U.element_size() * self.T * self.width * (k + self.o)):
            m = torch.einsum("bctd,bck->btdk", self.g[rows].to(U.dtype), U[rows])
            total.index_add_(0, self.index[rows].reshape(-1), m.reshape(-1, self.width, k))
        return total.reshape(-1, k)

    def entry_columns(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """The columns of some entries of the table, ``(n, o, len(chosen) * width)``; ``chosen`` is sorted."""
        place = torch.searchsorted(chosen, self.index).clamp_max(len(chosen) - 1)
        hit = (chosen[place] == self.index).to(dtype)
        one_hot = torch.zeros(self.n, len(chosen), self.T, dtype=dtype, device=self.g.device)
        one_hot.scatter_add_(1, place.unsqueeze(1), hit.unsqueeze(1))
        g = self.g.to(dtype).transpose(1, 2).reshape(self.n, self.T, self.o * self.width)
        rows = torch.bmm(one_hot, g).reshape(self.n, len(chosen), self.o, self.width)
        return rows.transpose(1, 2).reshape(self.n, self.o, -1)

    def columns(self, lo: int, hi: int, dtype: torch.dtype | None = None) -> Tensor:
        chosen = torch.arange(lo // self.width, hi // self.width, device=self.g.device)
        return self.entry_columns(chosen, dtype or self.g.dtype)

    def row_operations(self) -> float:
        return float(self.n * self.o * self.T * self.width)

    def product_operations(self) -> float:
        return 2.0 * self.n * self.o * self.T * self.width
