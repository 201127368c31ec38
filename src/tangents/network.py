"""The user's network as a function of its chosen parameters, on a private copy that shares its weights."""

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tangents.errors import MixesSamples, NoDerivative, NonFinite, ParametersChanged
from tangents.inputs import Batch, length, move, tensors
from tangents.parameters import Choice, Columns, choose
from tangents.sharing import fingerprint, refuse_meta, share, tell_about_training_mode, unwrap

Outputs = None | int | slice | str | Callable[[Any], Tensor]

# Random state, the stance of torch.compile, the choice of attention kernels and the level of forward mode are each one
# for the whole process: whoever changes them holds this until they are as before.
PROCESS_STATE = threading.RLock()


class Network:
    """``f(x; theta)`` with ``n`` inputs to ``(n, o)`` outputs, in eval mode.

    The copy shares the user's parameters (no second set of weights) and owns all else: its buffers, its mode and
    what requires grad are changed without the user's network noticing.
    """

    def __init__(self, model: nn.Module, params: Choice = None, outputs: Outputs = None) -> None:
        original = unwrap(model)
        self.original = original
        chosen = choose(original, params)
        refuse_meta(original)
        tell_about_training_mode(original)
        self.model = share(original, set(chosen))
        own = dict(self.model.named_parameters())
        self.parameters: dict[str, nn.Parameter] = {name: own[name] for name in chosen}
        for name, parameter in own.items():  # a scripted module is copied with its own weights
            if parameter.is_floating_point():
                parameter.requires_grad_(name in chosen)
        self.columns = Columns(tuple(chosen), tuple(p.shape for p in chosen.values()))
        self.device = next(iter(self.parameters.values())).device
        floating = {p.dtype for p in own.values() if p.is_floating_point()}
        self.dtype = functools.reduce(torch.promote_types, (p.dtype for p in self.parameters.values()))
        self.precision = max(floating, key=lambda dtype: torch.finfo(dtype).eps)  # of the roughest part
        _refuse_several_devices(own)
        if not (outputs is None or callable(outputs) or type(outputs) in (int, slice, str)):
            raise TypeError(
                "outputs= takes None, an index, a slice, the name of a field, or a function of what the network "
                f"returns; not {type(outputs).__name__}"
            )
        self._outputs = outputs
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in self.model.modules())
        self.overwrites = False  # its inputs
        self._state = fingerprint(original)

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        """No other thread runs the copy meanwhile."""
        return PROCESS_STATE

    def check_unchanged(self) -> None:
        """Raise if the user's parameters are no longer those that were linearised."""
        now = fingerprint(self.original)
        changed = [name for name, state in self._state.items() if now.get(name) != state]
        if changed or len(now) != len(self._state):
            raise ParametersChanged(
                f"the network's parameters changed since it was linearised ({(changed or ['one was added'])[0]!r} "
                f"among {max(len(changed), 1)}): linearize again, with tangents.linearize(model)"
            )

    def __call__(
        self,
        batch: Batch,
        mode: TorchFunctionMode | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        offset: int = 0,
    ) -> Tensor:
        """The outputs ``(n, o)`` of a batch; ``parameters`` stand in for the network's own where given.

        ``mode`` watches the operations; ``offset`` is the index of the batch's first input, for messages.
        """
        rows = length(batch)
        with PROCESS_STATE, _surroundings(self.device, self._recurrent), mode or Watch():
            batch = move(batch, self.device)
            args, kwargs = _arguments(tree_map(self._own, batch))
            try:
                if parameters is None:
                    raw = self.model(*args, **kwargs)
                else:
                    raw = torch.func.functional_call(self.model, dict(parameters), args, kwargs)
            except RuntimeError as error:
                _explain_dtype(error, batch, self.dtype)
                raise
            result = self._select(raw, rows)
        _refuse_non_finite(result, offset)
        return result

    def _own(self, leaf: Any) -> Any:
        """An input, or a copy where it would be overwritten, or where autodiff cannot keep it."""
        return cloned(leaf) if isinstance(leaf, Tensor) and (self.overwrites or leaf.is_inference()) else leaf

    def outputs_with_graph(self, batch: Batch, mode: TorchFunctionMode | None = None, offset: int = 0) -> Tensor:
        """The outputs, recorded for differentiation with respect to the chosen parameters."""
        with torch.inference_mode(False), torch.enable_grad():
            result = self(batch, mode, offset=offset)
        if not result.requires_grad:
            raise NoDerivative(
                "the outputs do not depend differentiably on any chosen parameter (argmax, round, detach() and "
                "no_grad() cut the dependence): linearise what comes before them, with outputs=, or choose other "
                "parameters"
            )
        return result

    def _select(self, raw: Any, rows: int) -> Tensor:
        """What the network returned, as ``(n, o)`` with the asked-for outputs."""
        choice = self._outputs
        if isinstance(choice, str):
            result = _field(raw, choice)
        else:
            result = choice(raw) if callable(choice) else _only_tensor(raw)
        if not isinstance(result, Tensor):
            raise TypeError(f"outputs= must return a tensor of shape (n, o), not {type(result).__name__}")
        if result.is_complex():
            raise TypeError(
                "the network's outputs are complex: linearise a real part, with outputs=lambda out: out.real"
            )
        if not result.is_floating_point():
            raise NoDerivative(
                f"the network's outputs are {result.dtype}, not floating point, and have no derivative: linearise the "
                "scores that they are made from, with outputs="
            )
        if result.dim() == 0 or result.shape[0] != rows:
            raise MixesSamples(
                f"the network made outputs of shape {tuple(result.shape)} from {rows} inputs: the first dimension must "
                "be the inputs'; return one row an input (outputs=lambda out: ... can rearrange them)"
            )
        result = result.reshape(rows, -1)
        if isinstance(choice, int):
            if not -result.shape[1] <= choice < result.shape[1]:
                raise ValueError(f"outputs={choice}, but the network has {result.shape[1]} outputs an input")
            return result[:, choice].unsqueeze(1)
        if isinstance(choice, slice):
            result = result[:, choice]
        if result.shape[1] == 0:
            raise ValueError("no outputs are left to linearise: check outputs=")
        return result


class Watch(TorchFunctionMode):
    """A mode that passes every operation on.

    With any mode active torch's attention layers leave their fused inference path, which has no derivative. A padding
    row of an embedding is a constant to reverse mode but not to torch's forward mode, nor to finite differences: here
    it is to all. ``held`` gives the padding row's own values where a weight has been replaced by a moved one. Nor does
    forward mode stop at ``no_grad()``, as reverse mode does: with ``forward`` it does.
    """

    def __init__(self, held: Mapping[int, Tensor] | None = None, forward: bool = False) -> None:
        super().__init__()
        self._held, self._forward = held or {}, forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._forward and not torch.is_grad_enabled():
            with forward_ad._set_fwd_grad_enabled(False):
                return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.embedding:
            return self._hold_padding(result, *args, **(kwargs or {}))
        return result

    def _hold_padding(
        self, result: Tensor, index: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
    ) -> Tensor:
        if padding_idx is None:
            return result
        padding = index == padding_idx % weight.shape[0]
        own = self._held.get(id(weight))
        constant = result.detach() if own is None else own.detach()[padding_idx].expand(result.shape)
        return torch.where(padding.unsqueeze(-1), constant, result)


def random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Random numbers drawn inside leave the CPU's and this device's state as they were."""
    return torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else [])


@contextlib.contextmanager
def _surroundings(device: torch.device, recurrent: bool) -> Iterator[None]:
    """Leave the random state as it was, and run compiled parts eagerly, so that their operations can be seen."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_state(device))
        if recurrent and device.type == "cuda":  # cuDNN's recurrent networks have no derivatives in eval mode
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def gradients(
    outputs: Tensor, inputs: Sequence[Any], cotangent: Tensor, create_graph: bool = False, batched: bool = False
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, the graph kept, with an error of ours where an operation has no derivative."""
    try:
        return torch.autograd.grad(
            outputs,
            inputs,
            cotangent,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented" in str(error):
            raise NoDerivative(
                f"an operation of the network has no derivative ({error}): replace it, linearise what comes before it "
                "with outputs=, or choose parameters that come after it"
            ) from error
        raise


def random_cotangent(outputs: Tensor) -> Tensor:
    """Random numbers in the outputs' shape, the same each time, that leave the user's random state alone."""
    u = torch.randn(outputs.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32)
    return u.to(outputs.device, outputs.dtype)


def custom_functions(outputs: Tensor) -> list[str]:
    """The names of the network's own ``torch.autograd.Function``s, found in the graph of its outputs."""
    python = [n for n in graph_nodes(outputs) if issubclass(type(n), torch.autograd.function.BackwardCFunction)]
    return sorted({node.name().removesuffix("Backward") for node in python})


def graph_nodes(outputs: Tensor) -> list[Any]:
    """All nodes of the graph that made some outputs."""
    seen: dict[Any, None] = {}
    stack: list[Any] = [outputs.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack += [following for following, _ in node.next_functions]
    return list(seen)


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """Attention by plain operations: the fused kernels have neither forward mode nor second derivatives."""
    with PROCESS_STATE, sdpa_kernel(SDPBackend.MATH):
        yield


def cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _field(raw: Any, name: str) -> Any:
    found = raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)
    if found is None:
        raise ValueError(f"outputs={name!r}: the network returns a {type(raw).__name__} without such a field")
    return found


def _refuse_several_devices(parameters: Mapping[str, Tensor]) -> None:
    devices = {str(p.device) for p in parameters.values()}
    if len(devices) > 1:
        raise ValueError(f"the network's parameters lie on {', '.join(sorted(devices))}: put them on one device")


def _only_tensor(raw: Any) -> Tensor:
    if isinstance(raw, Tensor):
        return raw
    fields: dict[str, Any] = {}
    if isinstance(raw, Mapping):
        fields = dict(raw)
    elif dataclasses.is_dataclass(raw) and not isinstance(raw, type):
        fields = {field.name: getattr(raw, field.name) for field in dataclasses.fields(raw)}
    logits = fields.get("logits")
    if isinstance(logits, Tensor):
        return logits
    found = [leaf for leaf in tree_flatten(list(fields.values()) or raw)[0] if isinstance(leaf, Tensor)]
    if len(found) == 1:
        return found[0]
    what = f"a {type(raw).__name__}" + (f" with {', '.join(map(str, fields))}" if fields else "")
    raise TypeError(
        f"the network returns {what}: say which tensor to linearise, such as "
        f"outputs=lambda out: out{'.' + str(next(iter(fields))) if fields else '[0]'}"
    )


def _refuse_non_finite(result: Tensor, offset: int) -> None:
    with torch.no_grad():
        finite = torch.isfinite(result.detach()).all(1)
        if not torch.compiler.is_compiling() and not _is_transformed(finite) and not bool(finite.all()):
            row = int((~finite).nonzero()[0]) + offset
            raise NonFinite(f"the network's output for input {row} is not finite: check that input and the weights")


def _is_transformed(tensor: Tensor) -> bool:
    """Inside ``torch.func`` transforms a tensor has no value to look at."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _explain_dtype(error: RuntimeError, batch: Batch, dtype: torch.dtype) -> None:
    leaves = tensors(batch)
    wrong = [x.dtype for x in leaves if x.dtype != dtype and (x.is_floating_point() or len(leaves) == 1)]
    if wrong and "type" in str(error):
        raise TypeError(
            f"the inputs are {wrong[0]} but the network is {dtype}: convert one of them, such as inputs.to({dtype}) or "
            f"model.to({wrong[0]}) ({error})"
        ) from error
