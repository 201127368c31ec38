"""Prior covariances ``S`` of the parameters' displacement: what K = J S J^T and F-based solves are weighted with.

A prior says how each parameter is weighted; bound to the columns of a Jacobian it can be multiplied with. No prior
couples two parameters, so S is block-diagonal over them.
"""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tangents.parameters import Columns
from tangents.precision import wide

# How one parameter is weighted: by a scale, entry by entry, or by a pair of matrices (B, A) that stand for kron(B, A)
# on the flattened parameter of shape (len(B), len(A)).
Weight = float | Tensor | tuple[Tensor, Tensor]


class Prior(ABC):
    """A prior covariance, before it is known which parameters it meets."""

    @abstractmethod
    def weights(self, columns: Columns) -> dict[str, Weight]:
        """The weight of each parameter."""

    def bind(self, columns: Columns) -> "BoundPrior":
        return BoundPrior(columns, self.weights(columns))


@dataclass(frozen=True)
class Scalar(Prior):
    """``S = scale * I``: the paper's prior, with a scale."""

    scale: float = 1.0

    def weights(self, columns: Columns) -> dict[str, Weight]:
        return dict.fromkeys(columns.names, _positive(self.scale, "the prior's scale"))


@dataclass(frozen=True)
class Diagonal(Prior):
    """``S = diag(variances)``: a variance for each parameter entry, ``(p,)``."""

    variances: Tensor

    def weights(self, columns: Columns) -> dict[str, Weight]:
        if self.variances.shape != (columns.total,):
            raise ValueError(
                f"a diagonal prior needs one variance for each of the {columns.total} chosen parameter entries, "
                f"shape ({columns.total},); got {tuple(self.variances.shape)}"
            )
        if not bool((self.variances >= 0).all()):
            raise ValueError("a diagonal prior's variances must be at least 0 (and not NaN)")
        return {name: self.variances[part] for name, part in columns.slices().items()}


@dataclass(frozen=True)
class Groups(Prior):
    """A scale for each group of parameters, named by glob patterns; what none names gets ``default``.

    A parameter that several patterns match takes the first one's scale.
    """

    scales: Mapping[str, float]
    default: float = 1.0

    def weights(self, columns: Columns) -> dict[str, Weight]:
        for pattern in self.scales:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in columns.names):
                raise ValueError(f"the prior's pattern {pattern!r} matches none of the chosen parameters")
        return {name: self._scale(name) for name in columns.names}

    def _scale(self, name: str) -> float:
        for pattern, scale in self.scales.items():
            if fnmatch.fnmatchcase(name, pattern):
                return _positive(scale, f"the prior's scale of {pattern!r}")
        return _positive(self.default, "the prior's default scale")


@dataclass(frozen=True)
class Kronecker(Prior):
    """``S_W = kron(B, A)`` for the named parameters ``W``, flattened row by row: B is ``(d0, d0)`` over the first
    dimension, A covers all others. Both symmetric positive semi-definite. The rest get ``default``."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    default: float = 1.0

    def weights(self, columns: Columns) -> dict[str, Weight]:
        result: dict[str, Weight] = dict.fromkeys(columns.names, _positive(self.default, "the prior's default scale"))
        for name, (B, A) in self.pairs.items():
            if name not in result:
                raise ValueError(f"the prior names {name!r}, which is none of the chosen parameters")
            size = dict(zip(columns.names, columns.sizes, strict=True))[name]
            shape = dict(zip(columns.names, columns.shapes, strict=True))[name]
            first = shape[0] if shape else 1
            if B.shape != (first, first) or A.shape != (size // max(first, 1),) * 2:
                raise ValueError(
                    f"the Kronecker prior of {name!r} (shape {tuple(shape)}) needs B of shape {(first, first)} and "
                    f"A of shape {(size // max(first, 1),) * 2}; got {tuple(B.shape)} and {tuple(A.shape)}"
                )
            for matrix in (B, A):
                if not torch.allclose(matrix, matrix.T, rtol=1e-5, atol=1e-8 * float(matrix.abs().max())):
                    raise ValueError(f"the Kronecker prior of {name!r} needs symmetric matrices")
                _root(matrix)  # refuses what is not positive semi-definite
            result[name] = (B, A)
        return result


def as_prior(prior: "Prior | float | None") -> Prior:
    """None is the identity, a number its multiple."""
    if prior is None:
        return Scalar(1.0)
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, int | float) and not isinstance(prior, bool):
        return Scalar(float(prior))
    raise TypeError(f"prior takes None, a number a (S = a I) or a tangents.priors object, not {type(prior).__name__}")


def _positive(scale: float, what: str) -> float:
    if not 0 <= float(scale) < float("inf"):
        raise ValueError(f"{what} must be a finite number of at least 0, not {scale}")
    return float(scale)


class BoundPrior:
    """A prior that knows the columns it weights."""

    def __init__(self, columns: Columns, weights: dict[str, Weight]) -> None:
        self.columns, self.weights = columns, weights
        self._slices = columns.slices()
        self._roots: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}

    def apply(self, V: Tensor) -> Tensor:
        """``S V`` for V of shape ``(p, k)``."""
        parts = [self._apply(self.weights[name], V[part]) for name, part in self._slices.items()]
        return torch.cat(parts)

    @staticmethod
    def _apply(weight: Weight, V: Tensor) -> Tensor:
        if isinstance(weight, tuple):
            B, A = (m.to(V) for m in weight)
            shaped = V.reshape(B.shape[0], A.shape[0], -1)
            return torch.einsum("ab,bck,cd->adk", B, shaped, A).reshape(V.shape)
        return V * (weight.to(V).unsqueeze(1) if isinstance(weight, Tensor) else weight)

    def root(self, name: str, dtype: torch.dtype) -> Weight:
        """A square root of the weight: what multiplies one row of J from the right, ``S = root root^T``."""
        weight = self.weights[name]
        if isinstance(weight, tuple):
            if (name, dtype) not in self._roots:
                self._roots[name, dtype] = _root(weight[0].to(dtype)), _root(weight[1].to(dtype))
            return self._roots[name, dtype]
        return weight.to(dtype).sqrt() if isinstance(weight, Tensor) else weight**0.5


def _root(matrix: Tensor) -> Tensor:
    """A square root of a positive semi-definite matrix, in float64, singular ones included."""
    values, vectors = torch.linalg.eigh(wide(matrix))
    if float(values[0]) < -1e-8 * max(float(values[-1].abs()), 1e-300):
        raise ValueError(
            f"a Kronecker prior's factor must be positive semi-definite; it has an eigenvalue {float(values[0]):.2e}"
        )
    root: Tensor = vectors * values.clamp_min(0).sqrt()
    return root.to(matrix.dtype)
