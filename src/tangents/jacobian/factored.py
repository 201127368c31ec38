"""The factored way: one forward pass and one backward pass an output, after which products need neither.

What the operations leave (`capture.py`) is sorted by input (`ownership.py`), kept as factors (`factors.py`), and
compared with automatic differentiation before it is believed. Parameters that no rule reaches, or whose factors
disagree, go through `implicit.py` on their own, and the two add up.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tangents.inputs import Batch, length, requires_grad, signature
from tangents.jacobian.capture import Capture, watch
from tangents.jacobian.factors import Factor, Outer, Rows
from tangents.jacobian.implicit import Abilities, ImplicitBlock
from tangents.jacobian.ownership import SHARED, Layout, owners
from tangents.jacobian.uses import MatrixUse, SumUse, Use
from tangents.network import Network, custom_functions, gradients

# How far factors may be from automatic differentiation, relative to the gradient: rounding, not a wrong factor.
AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass
class Findings:
    """What was found out about one network's operations, kept from batch to batch."""

    generic: dict[str, str] = field(default_factory=dict)  # parameter -> why it goes the generic way
    layouts: dict[Any, Layout | None] = field(default_factory=dict)
    checked: set[Any] = field(default_factory=set)
    told: bool = False  # that some parameters have no influence
    spread: dict[Any, bool] = field(default_factory=dict)  # whether tables can be read for each input
    abilities: Abilities = field(default_factory=Abilities)


class FactoredBlock:
    """J of one batch, as factors where rules reach and implicitly elsewhere."""

    def __init__(self, network: Network, batch: Batch, findings: Findings, offset: int = 0) -> None:
        self.n = length(batch)
        self._network = network
        keep_graph = requires_grad(batch)
        outputs, capture = _watch(network, batch, offset, keep_graph, findings)
        self.o = outputs.shape[1]
        for name, reason in capture.generic.items():
            findings.generic.setdefault(name, reason)
        uses = [use for use in capture.uses if use.name not in findings.generic]
        believe = not capture.routed
        if "CheckpointFunction" in custom_functions(outputs):
            reason = "the network has a re-entrant checkpoint, which hides its operations"
            findings.generic.update(dict.fromkeys(network.columns.names, reason))
            uses = []
        backward = _Backward(outputs, uses, keep_graph)
        key = (signature(batch), tuple((u.name, u.start, u.shape) for u in uses))
        layouts = self._layouts(backward, uses, findings, key if believe else None)
        uses = [u for u in uses if u.name not in findings.generic]
        self.factors, self.captured_bytes = _factors(backward, uses, layouts, self.o, keep_graph)
        if not keep_graph and not (believe and key in findings.checked):
            self._check(outputs, findings)
            findings.checked.add(key)
        for name in findings.generic:
            self.factors.pop(name, None)
        self.outputs = outputs if keep_graph else outputs.detach()
        names = [name for name in network.columns.names if name in findings.generic]
        self.generic = ImplicitBlock(network, batch, findings.abilities, self.o, names, offset) if names else None

    @property
    def nbytes(self) -> int:
        held = sum(f.nbytes for factors in self.factors.values() for f in factors)
        return held + (self.generic.nbytes if self.generic else 0)

    def jvp(self, V: Tensor) -> Tensor:
        """``(p, k) -> (n, o, k)``."""
        total = V.new_zeros(self.n, self.o, V.shape[1])
        for name, part in self._network.columns.slices().items():
            for f in self.factors.get(name, []):
                total = total + f.jvp(V[part])
        if self.generic:
            total = total + self.generic.jvp(V[self._generic_index(V.device)]).to(total.dtype)
        return total

    def vjp(self, U: Tensor) -> Tensor:
        """``(n, o, k) -> (p, k)``."""
        columns = self._network.columns
        parts = [
            _assembled(self.factors.get(name, []), size, U)
            for name, size in zip(columns.names, columns.sizes, strict=True)
        ]
        total = torch.cat(parts)
        if self.generic:
            index = self._generic_index(U.device)
            total = total.index_add(0, index, self.generic.vjp(U).to(total.dtype))
        return total

    def generic_rows(self) -> dict[str, Tensor]:
        return self.generic.generic_rows() if self.generic else {}

    def release(self) -> None:
        if self.generic:
            self.generic.release()

    def _generic_index(self, device: torch.device) -> Tensor:
        assert self.generic is not None
        parts = self._network.columns.slices()
        spans = [parts[name] for name in self.generic.columns.names]
        return torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])

    def _layouts(
        self, backward: "_Backward", uses: Sequence[Use], findings: Findings, key: Any | None
    ) -> list[Layout | None]:
        """How each use's rows sort by input; None where no gradient came. Shared rows send a parameter away."""
        if key is not None and key in findings.layouts:
            return findings.layouts[key]  # type: ignore[return-value]
        found = owners(backward.rows, _cotangent(backward.outputs)) if uses and self.n > 1 else None
        layouts: list[Layout | None] = []
        for i, use in enumerate(uses):
            if found is None:
                layouts.append(Layout(1, 1, -1))
            elif found[i].numel() == 0:
                layouts.append(None)
            elif bool((found[i] == SHARED).any()):
                findings.generic[use.name] = (
                    "several inputs own one row of its operation (a table that all inputs share)"
                )
                layouts.append(None)
            else:
                layouts.append(Layout.of(found[i], self.n))
        kept = [(layout, u) for layout, u in zip(layouts, uses, strict=True) if u.name not in findings.generic]
        layouts = [layout for layout, _ in kept]
        if key is not None and all(layout is None or layout.index is None for layout in layouts):
            findings.layouts[(key[0], tuple((u.name, u.start, u.shape) for _, u in kept))] = layouts  # type: ignore[assignment]
        return layouts

    def _check(self, outputs: Tensor, findings: Findings) -> None:
        """Compare ``J^T u`` from the factors with automatic differentiation, parameter by parameter."""
        u = _cotangent(outputs)
        names = [name for name in self._network.columns.names if name not in findings.generic]
        parameters = [self._network.parameters[name] for name in names]
        if not names:
            return
        truth, idle = gradients(outputs, parameters, u), []
        # A gradient that cancels (a weight before a norm that undoes its scale) is rounding beside the others.
        noise = 100 * torch.finfo(self._network.precision).eps * _norm(truth)
        for name, exact in zip(names, truth, strict=True):
            size = self._network.parameters[name].numel()
            mine = _assembled(self.factors.get(name, []), size, u.unsqueeze(2)).squeeze(1).double()
            want = torch.zeros_like(mine) if exact is None else exact.reshape(-1).double()
            if exact is None:
                idle.append(name)
            error_norm, norm = float((mine - want).norm()), float(want.norm())
            if not error_norm <= AGREEMENT.get(self._network.precision, 1e-3) * norm + noise:
                findings.generic[name] = (
                    "no operation that uses it was seen (a custom Function, a script?)" if name not in self.factors
                    else f"its factors differ from automatic differentiation by {error_norm / max(norm, 1e-300):.1e}"
                )  # fmt: skip
        if idle and not findings.told:
            findings.told = True
            warnings.warn(
                f"the outputs do not depend on {', '.join(map(repr, idle[:5]))}{' and others' if idle[5:] else ''}: "
                "these columns of J are zero; leave them out with params= to save the memory",
                stacklevel=2,
            )


def _norm(found: Sequence[Tensor | None]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))


def _watch(network: Network, batch: Batch, offset: int, keep_graph: bool, findings: Findings) -> tuple[Tensor, Capture]:
    """Watch a forward pass, with tables read for each input if the network bears it and gives the same outputs."""
    place = signature(batch)
    if findings.spread.get(place, True):
        try:
            outputs, capture = watch(network, batch, offset, keep_graph)
            if not capture.spread or place in findings.spread:
                return outputs, capture
            with torch.no_grad():
                plain = network(batch, offset=offset)
            close = 100 * torch.finfo(network.precision).eps * float(plain.abs().max())
            findings.spread[place] = plain.shape == outputs.shape and bool(((plain - outputs).abs() <= close).all())
        except (RuntimeError, ValueError, IndexError):
            findings.spread[place] = False
        if findings.spread[place]:
            return outputs, capture
    return watch(network, batch, offset, keep_graph, spread=False)


def _assembled(factors: Sequence[Factor], size: int, U: Tensor) -> Tensor:
    """``J^T U`` of one parameter from its factors, ``(size, k)``."""
    total: Tensor | None = None
    for f in factors:
        value = f.vjp(U)
        if f.size != size:
            value = torch.nn.functional.pad(value, (0, 0, f.start, size - f.start - f.size))
        total = value if total is None else total + value
    return U.new_zeros(size, U.shape[2]) if total is None else total


def _cotangent(outputs: Tensor) -> Tensor:
    """Random numbers that leave the user's random state alone."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(outputs.shape, generator=generator, dtype=torch.float32)
    return u.to(outputs.device, outputs.dtype)


class _Backward:
    """Gradients at the captured operations' outputs."""

    def __init__(self, outputs: Tensor, uses: Sequence[Use], keep_graph: bool) -> None:
        self.outputs, self.uses, self.keep_graph = outputs, uses, keep_graph
        self.edges: list[GradientEdge] = []
        place: dict[tuple[Any, int], int] = {}
        self.of_use: list[int] = []
        for use in uses:
            key = (use.edge.node, use.edge.output_nr)
            if key not in place:
                place[key] = len(self.edges)
                self.edges.append(use.edge)
            self.of_use.append(place[key])

    def __call__(self, cotangent: Tensor) -> list[Tensor | None]:
        """For each edge the gradient of ``<outputs, cotangent>``."""
        if not self.edges:
            return []
        return list(gradients(self.outputs, self.edges, cotangent, self.keep_graph))

    def rows(self, cotangent: Tensor) -> list[Tensor | None]:
        """For each use the gradient, cut into rows."""
        at_edges = self(cotangent)
        found = [(use, at_edges[i]) for use, i in zip(self.uses, self.of_use, strict=True)]
        return [None if g is None else use.rows(g) for use, g in found]


def _factors(
    backward: _Backward, uses: Sequence[Use], layouts: Sequence[Layout | None], o: int, keep_graph: bool
) -> tuple[dict[str, list[Factor]], int]:
    """One backward pass for each output, its gradients sorted by input; then one factor for each use.

    Also the bytes of all factors before any is narrowed to its rows: what the capture held at once.
    """
    n = backward.outputs.shape[0]
    edge_of = {id(use): i for use, i in zip(backward.uses, backward.of_use, strict=True)}
    sorted_uses = [(use, layout, edge_of[id(use)]) for use, layout in zip(uses, layouts, strict=True) if layout]
    stacks: list[Tensor | list[Tensor] | None] = [None] * len(sorted_uses)
    twin = _twins(sorted_uses, n)
    for c in range(o):
        one = torch.zeros_like(backward.outputs)
        one[:, c] = 1
        at_edges = backward(one)
        for k, (use, layout, edge) in enumerate(sorted_uses):
            g = at_edges[edge]
            if k in twin or g is None or g.numel() == 0:  # an expert that no input was sent to
                continue
            value = use.reduce(g, layout.gather) if isinstance(use, SumUse) else layout.gather(use.rows(g))
            stacks[k] = _put(stacks[k], value, c, o, keep_graph)
        del at_edges
    captured = 0
    factors: dict[str, list[Factor]] = {}
    made: dict[int, Factor] = {}
    for k, (use, layout, _) in enumerate(sorted_uses):
        if k in twin:
            continue
        stack, stacks[k] = stacks[k], None
        if stack is not None:
            if isinstance(stack, list):
                stack = torch.stack(stack + [torch.zeros_like(stack[0])] * (o - len(stack)), 1)
            f = use.factor(stack, layout.gather)
            captured += stack.numel() * stack.element_size() + f.nbytes
            made[k] = f.narrowed() if isinstance(f, Outer) and not keep_graph and k not in twin.values() else f
    for k, (use, _, _) in enumerate(sorted_uses):
        if k in twin and twin[k] in made:
            weight = made[twin[k]]
            assert isinstance(weight, Outer)
            made[k] = Rows(use.start, weight.g.squeeze(2) if weight.T == 1 else weight.g.sum(2))
    for k, (use, _, _) in enumerate(sorted_uses):
        if k in made:
            f = made[k]
            factors.setdefault(use.name, []).append(f.narrowed() if isinstance(f, Outer) and not keep_graph else f)
    return {name: _merge(found) for name, found in factors.items()}, captured


def _twins(uses: Sequence[tuple[Use, Layout, int]], n: int) -> dict[int, int]:
    """Biases whose gradient is that of their weight's operation: use -> the weight's use."""
    weights = {edge: k for k, (use, _, edge) in enumerate(uses) if isinstance(use, MatrixUse) and not use.columns}
    return {
        k: weights[edge]
        for k, (use, _, edge) in enumerate(uses)
        if isinstance(use, SumUse) and edge in weights and use.times is None and use.scale == 1
        and use.size == use.shape[-1] and use.like == (use.shape[-1],)
    }  # fmt: skip


def _put(stack: Any, value: Tensor, c: int, o: int, keep_graph: bool) -> Any:
    """Output c's share: into a buffer ``(n, o, ...)``, or a list where autodiff must see through."""
    if keep_graph:
        before = stack if stack is not None else []
        return [*before, *[torch.zeros_like(value)] * (c - len(before)), value]
    if stack is None:
        stack = value.new_zeros(value.shape[0], o, *value.shape[1:])
    stack[:, c] = value
    return stack


def _merge(factors: list[Factor]) -> list[Factor]:
    """Uses of the same weight become one factor, with more positions."""
    merged: list[Factor] = []
    for f in factors:
        last = merged[-1] if merged else None
        if isinstance(f, Rows) and isinstance(last, Rows) and f.span == last.span:
            merged[-1] = Rows(f.start, last.values + f.values)
        elif (
            isinstance(f, Outer) and isinstance(last, Outer) and f.span == last.span
            and f.flipped == last.flipped and f.window is None and last.window is None
        ):  # fmt: skip
            merged[-1] = Outer(f.start, torch.cat([last.a, f.a], 1), torch.cat([last.g, f.g], 2), flipped=f.flipped)
        else:
            merged.append(f)
    return merged
