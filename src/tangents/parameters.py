"""Choosing parameters, and the order in which they make the columns of a Jacobian."""

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Predicate = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class LastLayers:
    """The last ``count`` modules that own parameters; made by `last_layers`."""

    count: int


Choice = None | str | Sequence[str] | LastLayers | Predicate


def last_layers(k: int = 1) -> LastLayers:
    """Choose the parameters of the last ``k`` modules (in registration order) that own any."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"last_layers(k) takes a whole number of at least 1, not {k!r}")
    return LastLayers(k)


def choose(model: nn.Module, params: Choice) -> dict[str, nn.Parameter]:
    """The chosen parameters by name, in ``named_parameters()`` order, tied weights once.

    ``params``: None for all that require grad, glob pattern(s) on names, `last_layers`, or a predicate
    ``(name, parameter) -> bool``. A parameter chosen by name or predicate need not require grad.
    """
    named = dict(model.named_parameters())
    if not named:
        raise ValueError("the network has no parameters, so there is nothing to linearise")
    if params is None:
        chosen = {name for name, p in named.items() if p.requires_grad}
        if not chosen:
            raise ValueError(
                "no parameter of the network requires grad; choose some by name, such as params='*' for all of them"
            )
    elif isinstance(params, LastLayers):
        chosen = _of_last_layers(model, params.count)
    elif isinstance(params, str):
        chosen = _matching(model, [params])
    elif callable(params):
        chosen = {name for name, p in named.items() if params(name, p)}
        if not chosen:
            raise ValueError(f"the predicate chose none of the {len(named)} parameters: {_some(named)}")
    elif isinstance(params, Iterable) and all(isinstance(pattern, str) for pattern in params):
        chosen = _matching(model, list(params))
    else:
        raise TypeError(
            "params takes None, a glob pattern or a list of them, tangents.last_layers(k), or a predicate "
            f"(name, parameter) -> bool; not {type(params).__name__}"
        )
    result = {name: p for name, p in named.items() if name in chosen}
    _refuse_unusable(result)
    return result


def _of_last_layers(model: nn.Module, count: int) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    owners = [m for m in model.modules() if any(p is not None for p in m._parameters.values())]
    if count > len(owners):
        raise ValueError(f"last_layers({count}): only {len(owners)} modules of the network own parameters")
    return {names[id(p)] for m in owners[-count:] for p in m._parameters.values() if p is not None}


def _matching(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Names that match any pattern. A tied weight answers to each of its names; its first one is returned."""
    first = {id(p): name for name, p in model.named_parameters()}
    aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    if not patterns:
        raise ValueError("params is an empty list: choose at least one parameter")
    chosen: set[str] = set()
    for pattern in patterns:
        hits = (
            {aliases[pattern]}
            if pattern in aliases
            else {first_name for name, first_name in aliases.items() if fnmatch.fnmatchcase(name, pattern)}
        )
        if not hits:
            raise ValueError(f"no parameter matches {pattern!r}; {_near(pattern, list(aliases))}")
        chosen |= hits
    return chosen


def _near(pattern: str, names: list[str]) -> str:
    inside = [name for name in names if pattern.strip("*.") and pattern.strip("*.") in name]
    near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or inside[:5]
    if inside and any(name.startswith(pattern + ".") for name in inside):
        return f"a pattern covers the whole name: did you mean {pattern + '.*'!r}? (it has {_some(inside)})"
    return f"did you mean one of {_some(near)}?" if near else f"the network has {_some(names)}"


def _some(names: Iterable[str], limit: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(map(repr, listed[:limit])) + more


def _refuse_unusable(chosen: Mapping[str, nn.Parameter]) -> None:
    for name, p in chosen.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is lazy and has no shape yet: run the network once on an input first")
        if p.is_complex():
            raise TypeError(
                f"parameter {name!r} is complex, which tangents does not support: leave it out with params="
            )
        if not p.is_floating_point():
            raise TypeError(f"parameter {name!r} is {p.dtype}, which has no derivative: leave it out with params=")
        if p.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and holds no values: load the weights first")


@dataclass(frozen=True)
class Columns:
    """The columns of a Jacobian: which parameter lies where in the vector of length ``p``."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def slices(self) -> dict[str, slice]:
        """Where each parameter lies."""
        result, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            result[name] = slice(start, start + size)
            start += size
        return result

    def subset(self, names: Sequence[str]) -> "Columns":
        shape = dict(zip(self.names, self.shapes, strict=True))
        return Columns(tuple(names), tuple(shape[name] for name in names))

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """Named tensors to one vector ``(p,)``; with a trailing dimension ``k`` in each, to ``(p, k)``."""
        missing, extra = [n for n in self.names if n not in named], [n for n in named if n not in self.names]
        if missing or extra:
            raise ValueError(
                "flatten takes one tensor for each chosen parameter: "
                + (f"{_some(missing)} missing" if missing else f"{_some(extra)} not chosen")
            )
        blocks = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            value = named[name]
            if value.shape == shape:
                blocks.append(value.reshape(-1))
            elif value.shape[:-1] == shape:
                blocks.append(value.reshape(-1, value.shape[-1]))
            else:
                raise ValueError(f"{name!r} has shape {tuple(shape)}, but the tensor given has {tuple(value.shape)}")
        return torch.cat(blocks)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector ``(p,)`` to named tensors, as views; ``(p, k)`` gives each a trailing dimension ``k``."""
        if vector.dim() not in (1, 2) or vector.shape[0] != self.total:
            raise ValueError(
                f"unflatten takes ({self.total},) or ({self.total}, k), one entry for each chosen parameter entry; "
                f"got {tuple(vector.shape)}"
            )
        blocks = vector.split(list(self.sizes))
        return {
            name: block.reshape((*shape, *vector.shape[1:]))
            for name, shape, block in zip(self.names, self.shapes, blocks, strict=True)
        }
