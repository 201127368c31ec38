"""The implicit way: products by automatic differentiation, for any network, in the memory of one forward pass.

- ``J^T u``: one backward pass (reverse mode)
- ``J v``: forward mode; where an operation has none, two backward passes (``u -> J^T u`` is linear, and its own
  transpose is J); where it has no second derivative either, from rows
"""

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tangents.checks import refuse_non_finite_derivatives
from tangents.errors import NonFinite
from tangents.inputs import Batch, length, requires_grad, take
from tangents.jacobian.factors import Factor
from tangents.network import (
    Network,
    Watch,
    custom_functions,
    gradients,
    math_attention,
    random_cotangent,
)
from tangents.parameters import Columns
from tangents.precision import cancellation, rounding

AutodiffError = (RuntimeError, NotImplementedError, ValueError, TypeError)


@dataclass
class Abilities:
    """What was found out about automatic differentiation through one network."""

    forward_mode: bool = True
    double_backward: bool = True
    vmap: bool = True
    grad: bool = True  # False: only .backward() works (re-entrant checkpoints)
    checked: set[str] = field(default_factory=set)
    told: bool = False
    reasons: list[str] = field(default_factory=list)

    def lose(self, ability: str, error: Exception) -> None:
        setattr(self, ability, False)
        self.reasons.append(f"{ability.replace('_', ' ')}: {(str(error) or repr(error)).splitlines()[0][:200]}")


class ImplicitBlock:
    """J of one batch with respect to some of the network's parameters, by automatic differentiation."""

    factors: dict[str, list[Factor]] = {}  # noqa: RUF012  # none: all rows are generic

    def __init__(
        self,
        network: Network,
        batch: Batch,
        abilities: Abilities,
        outputs: int,
        names: Sequence[str] | None = None,
        offset: int = 0,
    ) -> None:
        self.network, self.batch, self.abilities, self.o, self.offset = network, batch, abilities, outputs, offset
        self.columns: Columns = network.columns if names is None else network.columns.subset(names)
        self.n = length(batch)
        self.keep_graph = requires_grad(batch)
        self._graph: Tensor | None = None
        self._rows: dict[str, Tensor] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [self.network.parameters[name] for name in self.columns.names]

    @property
    def outputs(self) -> Tensor:
        return self.graph().detach()

    @property
    def nbytes(self) -> int:
        return sum(r.numel() * r.element_size() for r in (self._rows or {}).values())

    def graph(self) -> Tensor:
        """The outputs with their graph: one forward pass serves all products with this batch."""
        if self._graph is None:
            with math_attention() if self.keep_graph else contextlib.nullcontext():
                self._graph = self.network.outputs_with_graph(self.batch, offset=self.offset)
        return self._graph

    def release(self, graph: bool = True) -> None:
        """Forget the rows, and the forward pass too unless products with this batch are to go on using it."""
        self._rows = None
        if graph:
            self._graph = None

    # ------------------------------------------------------------------------------------------- J^T u

    def vjp(self, U: Tensor) -> Tensor:
        """``(n, o, k) -> (p, k)``."""
        outputs = self.graph()
        U = U.to(outputs.dtype)
        return torch.stack([self._vjp(outputs, U[:, :, j]) for j in range(U.shape[2])], 1)

    def _vjp(self, outputs: Tensor, u: Tensor) -> Tensor:
        if self.abilities.grad:
            try:
                return self._flat(gradients(outputs, self.parameters, u, self.keep_graph))
            except RuntimeError as error:
                if "heckpoint" not in str(error):
                    raise
                self.abilities.lose("grad", error)
        return self._vjp_by_backward(u)

    def _vjp_by_backward(self, u: Tensor) -> Tensor:
        """Re-entrant checkpoints allow ``backward()`` alone; it fills the gradients of our own copy's parameters."""
        with self.network.exclusive():
            outputs = self.network.outputs_with_graph(self.batch, offset=self.offset)
            for p in self.network.parameters.values():
                p.grad = None
            try:
                torch.autograd.backward(outputs, u)
                return self._flat([p.grad for p in self.parameters])
            finally:
                for p in self.network.parameters.values():
                    p.grad = None

    def _flat(self, found: Sequence[Tensor | None]) -> Tensor:
        parts = []
        for p, g in zip(self.parameters, found, strict=True):
            parts.append(torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1))
        return torch.cat(parts) if self.keep_graph else torch.cat(parts).detach()

    # ------------------------------------------------------------------------------------------- J v

    def jvp(self, V: Tensor) -> Tensor:
        """``(p, k) -> (n, o, k)``."""
        V = V.to(self.network.dtype)
        if self.keep_graph:  # torch's third derivatives are not all right (layer norm's); rows need second ones only
            return self._by_rows(V)
        for method in self._methods(V.shape[1]):
            try:
                if method not in self.abilities.checked:
                    self._check(method)
                return self._with(method, V)
            except (NonFinite, torch.OutOfMemoryError):
                raise
            except AutodiffError as error:
                self.abilities.lose(method, error)
        if not self.abilities.told:
            self.abilities.told = True
            warnings.warn(
                "J @ v goes through the rows of J, which is slow: the network has neither forward mode nor second "
                f"derivatives ({'; '.join(self.abilities.reasons)}{self._suspects()})",
                stacklevel=2,
            )
        return self._by_rows(V)

    def _methods(self, k: int) -> list[str]:
        """In order: forward mode, and for many columns, which can share a graph, two backward passes first."""
        order = ("forward_mode", "double_backward") if k < 3 else ("double_backward", "forward_mode")
        return [method for method in order if getattr(self.abilities, method)]

    def _with(self, method: str, V: Tensor) -> Tensor:
        if method == "forward_mode":
            return torch.stack([self._forward_mode(V[:, j]) for j in range(V.shape[1])], 2)
        return self._double_backward(V)

    def _check(self, method: str) -> None:
        """Once a network: ``<u, J v> = <J^T u, v>``. Some operations lose a derivative without a word (functions that
        are differentiable once, in-place writes, hand-written forward modes)."""
        v = torch.randn(self.columns.total, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        v = v.to(self.network.device, self.network.dtype)
        u = random_cotangent(self.graph())
        product = self._with(method, v.unsqueeze(1)).squeeze(2).to(u.dtype)
        transposed = self.vjp(u.unsqueeze(2)).squeeze(1).to(v.dtype)
        difference = abs(float((u * product).sum() - transposed @ v))
        if not math.isfinite(difference):
            refuse_non_finite_derivatives(self.network, self.batch, self.offset)
        size = float(u.norm() * product.norm() + transposed.norm() * v.norm() / len(v) ** 0.5)
        # Derivatives that cancel (a weight before a norm that undoes its scale) are rounding: compare with all of J's.
        noise = cancellation(self.network.precision) * self._gradient_norm(u) * float(v.norm()) / len(v) ** 0.5
        if not difference <= 0.1 * rounding(self.network.precision) * size + noise:
            raise RuntimeError("it gives other products than reverse mode does")
        self.abilities.checked.add(method)

    def _gradient_norm(self, u: Tensor) -> float:
        """``|J^T u|`` over all of the network's chosen parameters, not this block's alone."""
        whole = ImplicitBlock(self.network, self.batch, self.abilities, self.o, offset=self.offset)
        return float(whole.vjp(u.unsqueeze(2)).norm())

    def _by_rows(self, V: Tensor) -> Tensor:
        rows = torch.cat(list(self.generic_rows().values()), 1)
        return (rows @ V.to(rows.dtype)).reshape(self.n, self.o, -1)

    def _suspects(self) -> str:
        names = custom_functions(self.graph())
        return f"; its custom functions: {', '.join(names)}" if names else ""

    def _forward_mode(self, v: Tensor) -> Tensor:
        tangents = self.columns.unflatten(v)
        parameters = {name: self.network.parameters[name].detach() for name in tangents}
        others = {n: p.detach() for n, p in self.network.parameters.items() if n not in tangents}

        def function(chosen: dict[str, Tensor]) -> Tensor:
            mode = Watch(forward=True)
            return self.network(self.batch, mode, parameters={**others, **chosen}, offset=self.offset)

        with torch.inference_mode(False), torch.enable_grad(), math_attention():
            tangents = {name: t.to(parameters[name].dtype) for name, t in tangents.items()}
            product: Tensor = torch.func.jvp(function, (parameters,), (tangents,))[1]
            return product.detach()

    def _double_backward(self, V: Tensor) -> Tensor:
        with torch.enable_grad(), math_attention():
            outputs = self.network.outputs_with_graph(self.batch, offset=self.offset)
            u = torch.zeros_like(outputs, requires_grad=True)
            found = gradients(outputs, self.parameters, u, create_graph=True)
            live = [(g, name) for g, name in zip(found, self.columns.names, strict=True) if g is not None]
            columns = []
            for j in range(V.shape[1]):
                directions = self.columns.unflatten(V[:, j])
                columns.append(
                    torch.autograd.grad(
                        [g for g, _ in live], u, [directions[name].to(g.dtype) for g, name in live],
                        retain_graph=True, allow_unused=True,
                    )[0]
                )  # fmt: skip
        columns = [torch.zeros_like(u) if c is None else c for c in columns]
        return torch.stack([c.detach() for c in columns], 2)

    # ------------------------------------------------------------------------------------------- rows

    def generic_rows(self) -> dict[str, Tensor]:
        """Dense rows ``(n * o, size)`` by parameter, from each input alone."""
        if self._rows is None:
            rows = self._rows_by_vmap() if self.abilities.vmap and not self.keep_graph else None
            self._rows = self._rows_by_loop() if rows is None else rows
        return self._rows

    def _rows_by_vmap(self) -> dict[str, Tensor] | None:
        names = self.columns.names
        chosen = {name: self.network.parameters[name].detach() for name in names}
        others = {n: p.detach() for n, p in self.network.parameters.items() if n not in chosen}

        leaves, structure = tree_flatten(self.batch)
        dims = [0 if isinstance(leaf, Tensor) and leaf.dim() > 0 else None for leaf in leaves]

        def function(parameters: dict[str, Tensor], single: list[Any]) -> Tensor:
            batch = [x if d is None else x.unsqueeze(0) for x, d in zip(single, dims, strict=True)]
            return self.network(tree_unflatten(batch, structure), parameters={**others, **parameters})[0]

        rows = torch.func.vmap(torch.func.jacrev(function), in_dims=(None, dims), chunk_size=_CHUNK)
        try:
            with torch.inference_mode(False), math_attention(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells of operations that it batches slowly
                result = rows(chosen, leaves)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # vmap fails in any way that the network's code can
            self.abilities.lose("vmap", error)
            return None
        return {name: r.detach().reshape(self.n * self.o, -1) for name, r in result.items()}

    def _rows_by_loop(self) -> dict[str, Tensor]:
        rows: list[Tensor] = []
        for i in range(self.n):
            alone = take(self.batch, slice(i, i + 1))
            single = ImplicitBlock(self.network, alone, self.abilities, self.o, self.columns.names, self.offset + i)
            single.keep_graph = self.keep_graph
            outputs = single.graph()
            for c in range(self.o):
                one = torch.zeros_like(outputs)
                one[0, c] = 1
                rows.append(single._vjp(outputs, one))
        stacked = torch.stack(rows)
        return dict(zip(self.columns.names, stacked.split(list(self.columns.sizes), 1), strict=True))


_CHUNK = 64  # inputs whose rows vmap forms at a time
