"""From the uses that a forward pass left to factors: backward passes, their gradients sorted by input."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tangents.jacobian.factors import Factor, Outer, Rows
from tangents.jacobian.ownership import Layout
from tangents.jacobian.uses import MatrixUse, SumUse, Use
from tangents.network import gradients

OUTPUTS_TOGETHER = 16  # whose backward passes run as one, on a GPU


class Backward:
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

    def each_output(self) -> Iterator[list[Tensor | None]]:
        """The gradients of each output summed over the inputs, which do not mix: one backward pass an output. On a GPU
        several at once, since small kernels leave it idle."""
        o = self.outputs.shape[1]
        together = 1 if self.keep_graph or self.outputs.device.type != "cuda" else OUTPUTS_TOGETHER
        done = 0
        while done < o and self.edges:
            count = min(together, o - done)
            ones = torch.zeros(count, *self.outputs.shape, dtype=self.outputs.dtype, device=self.outputs.device)
            ones[range(count), :, range(done, done + count)] = 1
            if count == 1:
                yield self(ones[0])
            else:
                try:
                    found = gradients(self.outputs, self.edges, ones, batched=True)
                except RuntimeError:  # an operation that vmap cannot batch
                    together = 1
                    continue
                yield from ([None if g is None else g[i] for g in found] for i in range(count))
            done += count

    def rows(self, cotangent: Tensor) -> list[Tensor | None]:
        """For each use the gradient, cut into rows."""
        at_edges = self(cotangent)
        found = [(use, at_edges[i]) for use, i in zip(self.uses, self.of_use, strict=True)]
        return [None if g is None else use.rows(g) for use, g in found]


def assemble(
    backward: Backward, uses: Sequence[Use], layouts: Sequence[Layout | None]
) -> tuple[dict[str, list[Factor]], int]:
    """One backward pass for each output, its gradients sorted by input; then one factor for each use.

    Also the bytes of all gradients before any is narrowed to its rows: what was held at once.
    """
    (n, o), keep_graph = backward.outputs.shape, backward.keep_graph
    edge_of = {id(use): i for use, i in zip(backward.uses, backward.of_use, strict=True)}
    sorted_uses = [(use, layout, edge_of[id(use)]) for use, layout in zip(uses, layouts, strict=True) if layout]
    stacks: list[Tensor | list[Tensor] | None] = [None] * len(sorted_uses)
    twin = _twins(sorted_uses, n)
    for c, at_edges in enumerate(backward.each_output()):
        for k, (use, layout, edge) in enumerate(sorted_uses):
            g = at_edges[edge]
            if k in twin:
                continue
            if g is None or g.numel() == 0:  # an expert that no input was sent to, an output that does not reach it
                if isinstance(stacks[k], Tensor):
                    stacks[k][:, c] = 0  # type: ignore[index,call-overload]
                continue
            value = use.reduce(g, layout.gather) if isinstance(use, SumUse) else layout.gather(use.rows(g))
            stacks[k] = _put(stacks[k], value, c, o, keep_graph)
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
            captured += stack.numel() * stack.element_size()
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
        stack = value.new_empty(value.shape[0], o, *value.shape[1:])
        stack[:, :c] = 0  # outputs that did not reach it
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
            and (f.q, f.r, f.flipped) == (last.q, last.r, last.flipped) and f.window is None and last.window is None
        ):  # fmt: skip
            merged[-1] = Outer(f.start, torch.cat([last.a, f.a], 1), torch.cat([last.g, f.g], 2), flipped=f.flipped)
        else:
            merged.append(f)
    return merged
