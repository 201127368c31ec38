"""Watching a forward pass for the operations that use a chosen parameter.

A `torch.overrides.TorchFunctionMode` sees every operation, whatever module calls it, so nothing here knows a module
class. An operation with a rule (`rules.py`) leaves a `Use`: what multiplied the parameter, and the gradient edge of
what came out, taken at once because a later in-place operation changes what the output means. A parameter that goes
through an operation without a rule is left to autodiff, with the reason.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from tangents.inputs import Batch, length
from tangents.jacobian.rules import RULES, NotCovered
from tangents.jacobian.uses import Use
from tangents.network import Network, math_attention

# Operations whose result depends on the values of the data in *where* things go. A network that calls one may send
# each batch another way, so what was found out on one batch is not believed on the next.
ROUTING = frozenset(
    [
        "nonzero",
        "masked_select",
        "masked_scatter",
        "masked_scatter_",
        "topk",
        "sort",
        "argsort",
        "argmax",
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "index_select",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "take",
        "take_along_dim",
        "unique",
        "unique_consecutive",
        "multinomial",
        "one_hot",
        "searchsorted",
        "bincount",
        "item",
        "tolist",
        "__bool__",
        "__int__",
        "__float__",
    ]
)


@dataclass(frozen=True)
class View:
    """A contiguous part of a parameter, possibly seen transposed: what a weight or a slice of it is."""

    name: str
    start: int
    size: int
    transposed: bool


@dataclass(eq=False)
class Capture(TorchFunctionMode):
    """Collects the uses of a network's chosen parameters while it is active.

    ``keep_graph`` keeps the captured inputs attached, for products that are differentiated themselves.
    """

    network: Network
    keep_graph: bool = False
    inputs: int = 1  # more than 1: tables that are read once for all inputs are read for each
    uses: list[Use] = field(default_factory=list)
    generic: dict[str, str] = field(default_factory=dict)  # parameter -> why no rule reaches it
    routed: bool = False
    spread: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._views: dict[int, tuple[Tensor, View]] = {
            id(p): (p, View(name, 0, p.numel(), False)) for name, p in self.network.parameters.items()
        }

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if name in ROUTING or (name in ("__getitem__", "__setitem__") and _indexes_with_tensor(args[1])):
            self.routed = True
        used = [(t, self._views[id(t)][1]) for t in _tensors_in((args, kwargs)) if id(t) in self._views]
        if not used:
            return func(*args, **kwargs)
        rule = RULES.get(name)
        if rule is None and isinstance(func, types.FunctionType) and func.__module__ == "torch.nn.functional":
            with self:  # a Python function that hides what it calls (attention): look inside
                return _without_overrides(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.inputs > 1 and name in ("F.embedding", "embedding") and result.dim() > 2 and result.shape[0] == 1:
            # One row of positions for all inputs: give each its own, so that each has its own gradient.
            result = result.expand(self.inputs, *result.shape[1:])
            self.spread = True
        outputs = [t for t in _tensors_in(result) if t.requires_grad]
        if rule is not None and outputs:
            self._apply(rule, name, result, args, kwargs, used)
        elif outputs and not all(self._is_known_view(t, used) for t in outputs):
            for _, view in used:
                self.leave(view.name, f"used by {name}, which has no rule")
        return result

    def _apply(
        self, rule: Callable[..., list[Tensor]], name: str, result: Tensor, args: Any, kwargs: Any, used: Any
    ) -> None:
        before = len(self.uses)
        try:
            covered = {id(t) for t in rule(self, result, *args, **kwargs)}
        except NotCovered as reason:
            del self.uses[before:]
            covered = set()
            for _, view in used:
                self.leave(view.name, f"used by {name}: {reason}")
        for tensor, view in used:
            if id(tensor) not in covered:
                self.leave(view.name, f"used by {name} where its rule does not look for a parameter")

    def _is_known_view(self, result: Tensor, used: list[tuple[Tensor, View]]) -> bool:
        """Whether a result is a parameter, or a part or transpose of one, that can be followed further."""
        if id(result) in self._views:
            return True
        for source, view in used:
            parameter = self.network.parameters[view.name]
            if not result._is_view() or result.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                continue
            start = int(result.storage_offset() - parameter.storage_offset())
            flipped = result.dim() == 2 and not result.is_contiguous() and result.t().is_contiguous()
            if (result.is_contiguous() or flipped) and parameter.is_contiguous() and source.requires_grad:
                self._views[id(result)] = (result, View(view.name, start, result.numel(), flipped))
                return True
        return False

    def view(self, tensor: Tensor | None) -> View | None:
        """What part of which chosen parameter a tensor is, if it is one."""
        found = self._views.get(id(tensor))
        return found[1] if found else None

    def leave(self, name: str, reason: str) -> None:
        """Leave a parameter to autodiff."""
        self.generic.setdefault(name, reason)

    def edge(self, result: Tensor) -> GradientEdge:
        return get_gradient_edge(result)

    def hold(self, tensor: Tensor) -> Tensor:
        """A captured input: by itself, or with its graph where products are differentiated."""
        return tensor if self.keep_graph else tensor.detach()

    def finish(self) -> None:
        """Drop the uses of parameters that cannot be trusted to them."""
        for use in self.uses:
            if use.overwritten():
                self.leave(use.name, "an input of its operation was overwritten in place afterwards")
        self.uses = [use for use in self.uses if use.name not in self.generic]


def watch(
    network: Network, batch: Batch, offset: int = 0, keep_graph: bool = False, spread: bool = True
) -> tuple[Tensor, Capture]:
    """Run the network on a batch and hand back its outputs, with their graph, and the uses that were seen.

    ``spread``: let tables that are read once for all inputs be read for each (which some networks do not bear).
    """
    capture = Capture(network, keep_graph, length(batch) if spread else 1)
    with math_attention() if keep_graph else contextlib.nullcontext():
        outputs = network.outputs_with_graph(batch, capture, offset)
    capture.finish()
    return outputs, capture


def operation_name(func: Any) -> str:
    """One name for an operation: ``F.name`` for the Python functions of torch.nn.functional, whose arguments may be
    ordered in another way than those of the operation below them, and the bare name for all else."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(func).split(".")[1]
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # a property of tensors, such as T
        return str(getattr(func.__self__, "__name__", name))
    if isinstance(func, types.FunctionType) and func.__module__ == "torch.nn.functional":
        return f"F.{name}"
    return name


def _indexes_with_tensor(index: Any) -> bool:
    return any(isinstance(part, Tensor) for part in (index if isinstance(index, tuple | list) else (index,)))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _without_overrides(func: types.FunctionType) -> types.FunctionType:
    """A copy of a Python function that does not ask whether its arguments are overridden.

    The original would ask, be told that a mode is active, and hand itself to the mode again, for ever.
    """
    never = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    twin = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin
