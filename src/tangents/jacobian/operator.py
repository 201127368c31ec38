"""J as an operator: shape, products, rows. One class for all ways; a way is a kind of block (`factored.py` ...)."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from tangents.errors import NonFinite
from tangents.inputs import Batch, Inputs, length
from tangents.jacobian.dense import DenseBlock
from tangents.jacobian.factored import FactoredBlock, Findings
from tangents.jacobian.features import Features, segments
from tangents.jacobian.implicit import ImplicitBlock
from tangents.jacobian.norms import squared_norms
from tangents.jacobian.plan import Plan
from tangents.network import Network
from tangents.precision import accumulator, wide
from tangents.priors import BoundPrior, as_prior


class Block(Features, Protocol):
    """J of one batch of inputs."""

    @property
    def outputs(self) -> Tensor: ...
    @property
    def nbytes(self) -> int: ...
    def jvp(self, V: Tensor) -> Tensor: ...
    def vjp(self, U: Tensor) -> Tensor: ...
    def release(self, graph: bool = True) -> None: ...


class Operator:
    """A matrix that is multiplied with, never written out: ``A @ v`` and ``A @ V`` with checked shapes."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    _name = "A"

    def _product(self, V: Tensor) -> Tensor:
        raise NotImplementedError

    def __matmul__(self, v: Tensor) -> Tensor:
        if not isinstance(v, Tensor):
            raise TypeError(f"{self._name} @ v takes a torch.Tensor, not {type(v).__name__}: try torch.as_tensor(v)")
        if v.dim() not in (1, 2) or v.shape[0] != self.shape[1]:
            raise ValueError(
                f"{self._name} has shape {self.shape}, so {self._name} @ v takes a tensor of shape ({self.shape[1]},) "
                f"or ({self.shape[1]}, k); got {tuple(v.shape)}"
            )
        if not v.is_floating_point():
            raise TypeError(f"{self._name} @ v takes floating-point numbers, not {v.dtype}: try v.double()")
        if v.device != self.device:
            raise ValueError(f"the network is on {self.device} and v on {v.device}: try v.to({str(self.device)!r})")
        # The vector decides the arithmetic: a float64 vector gets float64 sums from a float32 network's factors.
        dtype = torch.promote_types(torch.promote_types(v.dtype, self.dtype), torch.float32)
        result = self._product(v.to(dtype).unsqueeze(1) if v.dim() == 1 else v.to(dtype))
        if not bool(torch.isfinite(result.detach().sum())) and bool(torch.isfinite(v).all()):
            self._explain_non_finite()
        return (result.squeeze(1) if v.dim() == 1 else result).to(dtype)

    def _explain_non_finite(self) -> None:
        """Raise an error that names the input whose derivatives are not finite."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device={self.device})"


class Jacobian(Operator):
    """``J``, the derivative of ``(n, o)`` outputs with respect to ``p`` parameters: ``(n * o, p)``, input-major."""

    _name = "J"

    def __init__(self, network: Network, inputs: Inputs, plan: Plan, findings: Findings) -> None:
        self.network, self.inputs, self.plan, self.findings = network, inputs, plan, findings
        self.n, self.o = inputs.n, plan.counts.outputs
        self.shape = (self.n * self.o, network.columns.total)
        self.dtype, self.device = network.dtype, network.device
        self._kept: list[Block] | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------- products

    def _product(self, V: Tensor) -> Tensor:
        return torch.cat(list(self.each(lambda b: b.jvp(V).reshape(-1, V.shape[1]))))

    @property
    def T(self) -> "TransposedJacobian":
        return TransposedJacobian(self)

    def transposed_product(self, U: Tensor) -> Tensor:
        """``J^T U`` for ``(n * o, k)``; the sum over batches runs in float64."""
        total: Tensor | None = None
        start = 0
        for block in self.blocks():
            part = U[start : start + block.n * block.o].reshape(block.n, block.o, -1)
            start += block.n * block.o
            value = self.use(block, functools.partial(_vjp, part))
            total = value if total is None else wide(total) + value
        assert total is not None
        return total.to(U.dtype)

    def _explain_non_finite(self) -> None:
        bad = (~torch.isfinite(self.row_norms_squared())).nonzero()
        if len(bad):
            raise NonFinite(
                f"the derivatives of output {int(bad[0]) % self.o} at input {int(bad[0]) // self.o} are not finite: "
                "check that input (NaN, infinity, a root of zero?) and the weights"
            )

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """J itself, ``(n * o, p)``."""
        return torch.cat(list(self.each(lambda b: self.rows(b, dtype or self.dtype), keep=False)))

    def row_norms_squared(self, prior: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """``diag(J S J^T)``, ``(n * o,)``, without J or a loop over inputs; in float64 unless asked otherwise."""
        bound = prior if isinstance(prior, BoundPrior) else as_prior(prior).bind(self.network.columns)
        dtype = dtype or accumulator(self.device)
        return torch.cat(list(self.each(lambda b: squared_norms(b, bound, dtype).reshape(-1), keep=False)))

    def outputs(self) -> Tensor:
        """The network's outputs ``(n, o)`` at these inputs."""
        return torch.cat(list(self.each(lambda b: b.outputs, keep=False)))

    # ------------------------------------------------------------------------------------------- blocks

    def check_unchanged(self) -> None:
        """Raise if the parameters or the inputs are no longer those that this operator was made from."""
        self.network.check_unchanged()
        self.inputs.check_unchanged()

    def blocks(self, keep: bool = True) -> Iterator[Block]:
        """J batch by batch: from memory where the plan keeps them, else worked out anew. ``keep=False`` for what is
        done once: nothing is kept that was not already, and where no way was asked for it is the factored one, which
        is what all ways but the implicit one are made from."""
        self.check_unchanged()
        if keep and self.plan.keep and self._kept is None and not self.inputs.requires_grad:
            with self._lock:
                if self._kept is None:
                    self._kept = list(self._build(self.plan.way))
        if self._kept is not None:
            return iter(self._kept)
        return self._build("factored" if self.plan.asked == "auto" and not keep else self.plan.way)

    def _build(self, way: str) -> Iterator[Block]:
        start = 0
        for batch in self.inputs.batches(self.plan.batch):
            yield self._block(batch, start, way)
            start += length(batch)
        if start != self.n:
            raise ValueError(f"the data gave {start} inputs on this pass and {self.n} before: it must not change")

    def _block(self, batch: Batch, offset: int, way: str) -> Block:
        if way == "implicit":
            return ImplicitBlock(self.network, batch, self.findings.abilities, self.o, offset=offset)
        factored = FactoredBlock(self.network, batch, self.findings, offset)
        if way == "factored":
            return factored
        return DenseBlock(self.rows(factored, self.dtype), factored.outputs, self.network.columns)

    def each(self, function: Callable[[Block], Tensor], keep: bool = True) -> Iterator[Tensor]:
        """A function of every block, none of which outlives its turn unless it is kept."""
        blocks = self.blocks(keep)
        while (block := next(blocks, None)) is not None:
            yield self.use(block, function)
            del block

    def use(self, block: Block, function: Callable[[Block], Tensor]) -> Tensor:
        """Work with a block, then let it forget what can be worked out again and is not planned for."""
        try:
            return function(block)
        finally:
            self.done(block)

    def done(self, block: Block) -> None:
        """What the block can work out again is forgotten, unless the plan has room for it."""
        block.release(graph=not (self.plan.keep and self.plan.way == "implicit"))

    def rows_of(self, batch: Batch, offset: int) -> Tensor:
        """The rows of some inputs, ``(n * o, p)``, to sum over."""
        return wide(self.rows(self._block(batch, offset, "factored"), self.dtype))

    def rows(self, block: Block, dtype: torch.dtype) -> Tensor:
        """One block's rows ``(n * o, p)``."""
        generic = block.generic_rows()
        parts = []
        columns = self.network.columns
        for name, size in zip(columns.names, columns.sizes, strict=True):
            if name in generic:
                parts.append(generic[name].to(dtype))
                continue
            total = torch.zeros(block.n * block.o, size, dtype=dtype, device=self.device)
            for segment in segments([block], name):
                for f in segment.of(block):
                    total[:, f.start : f.start + f.size] += f.columns(0, f.size, dtype).reshape(-1, f.size)
            parts.append(total)
        return torch.cat(parts, 1)


class TransposedJacobian(Operator):
    """``J^T``, ``(p, n * o)``."""

    _name = "J.T"

    def __init__(self, jacobian: Jacobian) -> None:
        self._jacobian = jacobian
        self.shape = (jacobian.shape[1], jacobian.shape[0])
        self.dtype, self.device = jacobian.dtype, jacobian.device

    @property
    def T(self) -> Jacobian:
        return self._jacobian

    def _explain_non_finite(self) -> None:
        self._jacobian._explain_non_finite()

    def _product(self, V: Tensor) -> Tensor:
        return self._jacobian.transposed_product(V)

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._jacobian.to_dense(dtype).T


def _vjp(U: Tensor, block: Block) -> Tensor:
    return block.vjp(U)
