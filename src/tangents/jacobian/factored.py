"""The factored way: one forward pass and one backward pass an output, after which products need neither.

What the operations leave (`capture.py`) is sorted by input (`ownership.py`), kept as factors (`factors.py`), and
compared with automatic differentiation before it is believed. Parameters that no rule reaches, or whose factors
disagree, go through `implicit.py` on their own, and the two add up.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tangents.checks import check_halves, refuse_non_finite_derivatives
from tangents.inputs import Batch, length, requires_grad, signature
from tangents.jacobian.assembly import Backward, assemble
from tangents.jacobian.capture import Capture, watch
from tangents.jacobian.factors import Factor
from tangents.jacobian.implicit import Abilities, ImplicitBlock
from tangents.jacobian.ownership import SHARED, Layout, owners
from tangents.jacobian.uses import Use
from tangents.network import Network, custom_functions, gradients, random_cotangent
from tangents.precision import cancellation, rounding, wide


@dataclass
class Findings:
    """What was found out about one network's operations, kept from batch to batch."""

    generic: dict[str, str] = field(default_factory=dict)  # parameter -> why it goes the generic way
    layouts: dict[Any, list[Layout | None]] = field(default_factory=dict)
    separate: set[Any] = field(default_factory=set)  # where rows of several inputs were found, and samples not to mix
    told: bool = False  # that some parameters have no influence
    spread: dict[Any, bool] = field(default_factory=dict)  # whether tables can be read for each input
    abilities: Abilities = field(default_factory=Abilities)


class FactoredBlock:
    """J of one batch, as factors where rules reach and implicitly elsewhere."""

    def __init__(self, network: Network, batch: Batch, findings: Findings, offset: int = 0) -> None:
        self.n = length(batch)
        self._network, self._batch = network, batch
        self.factors: dict[str, list[Factor]] = {}
        keep_graph = requires_grad(batch)
        outputs, capture = _watch(network, batch, offset, keep_graph, findings)
        self.o = outputs.shape[1]
        for name, reason in capture.generic.items():
            findings.generic.setdefault(name, reason)
        uses = [use for use in capture.uses if use.name not in findings.generic]
        if "CheckpointFunction" in custom_functions(outputs):
            reason = "the network has a re-entrant checkpoint, which hides its operations"
            findings.generic.update(dict.fromkeys(network.columns.names, reason))
            uses = []
        self._backward = Backward(outputs, uses, keep_graph)
        truth = Truth(network, batch, outputs, findings, offset)
        self._build(uses, findings, None if capture.routed else signature(batch), truth)
        del self._backward, self._batch  # and with them the graph
        self.outputs = outputs if keep_graph else outputs.detach()
        names = [name for name in network.columns.names if name in findings.generic]
        self.factors = {name: found for name, found in self.factors.items() if name not in names}
        self.generic = ImplicitBlock(network, batch, findings.abilities, self.o, names, offset) if names else None

    @property
    def nbytes(self) -> int:
        return held_bytes(self.factors) + (self.generic.nbytes if self.generic else 0)

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

    def release(self, graph: bool = True) -> None:
        if self.generic:
            self.generic.release(graph)

    def _generic_index(self, device: torch.device) -> Tensor:
        assert self.generic is not None
        parts = self._network.columns.slices()
        spans = [parts[name] for name in self.generic.columns.names]
        return torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])

    def _build(self, uses: list[Use], findings: Findings, place: Any | None, truth: "Truth") -> None:
        """Factors that agree with automatic differentiation. The order of rows that was found on an earlier batch of
        the same shapes (``place``) is tried first; where it fails, it is found anew; what fails then goes the generic
        way. Every batch is compared: what is hidden in one (by a gate, by dead units) may show in the next."""
        key = None if place is None else (place, tuple((u.name, u.start, u.shape) for u in uses))
        known = findings.layouts.get(key)
        if known is not None:
            self.factors, self.captured_bytes = assemble(self._backward, uses, known)
            if not truth.differing(self.factors):
                return
        layouts, shared = self._layouts(uses)
        if shared and place not in findings.separate:
            check_halves(self._network, self._batch)  # a table, or samples that mix?
            findings.separate.add(place)
        kept = [(u, layout) for u, layout in zip(uses, layouts, strict=True) if u.name not in shared]
        self.factors, self.captured_bytes = assemble(self._backward, [u for u, _ in kept], [x for _, x in kept])
        wrong = shared | {name: why for name, why in truth.differing(self.factors).items() if name not in shared}
        findings.generic.update(wrong)
        for name in wrong:
            self.factors.pop(name, None)
        if key is not None and not wrong and all(layout is None or layout.certain for layout in layouts):
            findings.layouts[key] = layouts

    def _layouts(self, uses: Sequence[Use]) -> tuple[list[Layout | None], dict[str, str]]:
        """How each use's rows sort by input (None where no gradient came), and the parameters whose rows are shared."""
        if self.n == 1 or not uses:
            return [Layout(1, 1, -1) for _ in uses], {}
        layouts: list[Layout | None] = []
        shared: dict[str, str] = {}
        found = owners(self._backward.rows, random_cotangent(self._backward.outputs))
        for use, owner in zip(uses, found, strict=True):
            if bool((owner == SHARED).any()):
                shared[use.name] = "several inputs own one row of its operation (a table that all inputs share)"
            layouts.append(Layout.of(owner, self.n) if owner.numel() and use.name not in shared else None)
        return layouts, shared


def held_bytes(factors: Mapping[str, Sequence[Factor]]) -> int:
    """Bytes of all factors, those that share memory (a weight's and its bias's) counted once."""
    tensors = [t for found in factors.values() for f in found for t in f.tensors()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


class Truth:
    """``J^T u`` for a random u by automatic differentiation, parameter by parameter: what factors must agree with."""

    def __init__(self, network: Network, batch: Batch, outputs: Tensor, findings: Findings, offset: int = 0) -> None:
        self._network, self._outputs = network, outputs
        self._u = random_cotangent(outputs).unsqueeze(2)
        self._names = [name for name in network.columns.names if name not in findings.generic]
        if not self._names:
            return
        found = gradients(outputs, [network.parameters[name] for name in self._names], self._u.squeeze(2))
        self._found = dict(zip(self._names, found, strict=True))
        norms = [float(wide(g).norm()) for g in found if g is not None]
        if not math.isfinite(sum(norms)):
            refuse_non_finite_derivatives(network, batch, offset)
        # A gradient that cancels (a weight before a norm that undoes its scale) is rounding beside the others.
        self._noise = cancellation(network.precision) * math.hypot(*norms)
        idle = [name for name, g in self._found.items() if g is None]
        if idle and not findings.told:
            findings.told = True
            warnings.warn(
                f"the outputs do not depend on {', '.join(map(repr, idle[:5]))}{' and others' if idle[5:] else ''}: "
                "these columns of J are zero; leave them out with params= to save the memory",
                stacklevel=2,
            )

    def differing(self, factors: Mapping[str, Sequence[Factor]]) -> dict[str, str]:
        """The parameters whose factors are wrong, and by how much."""
        wrong: dict[str, str] = {}
        for name in self._names:
            with torch.no_grad():
                mine = _assembled(factors.get(name, []), self._network.parameters[name].numel(), self._u)
            exact = self._found[name]
            want = torch.zeros_like(mine) if exact is None else exact.reshape(-1, 1)
            difference, norm = float((wide(mine) - wide(want)).norm()), float(wide(want).norm())
            if difference <= rounding(self._network.precision) * norm + self._noise:
                continue
            if name in factors:
                wrong[name] = (
                    f"its factors differ from automatic differentiation by {difference / max(norm, 1e-300):.1e}"
                )
            else:
                wrong[name] = "no operation that uses it was seen (a custom Function, a script?)"
        return wrong


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
