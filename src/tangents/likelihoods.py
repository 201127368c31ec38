"""Likelihoods ``p(y | f)`` of outputs f, ``(n, o)``: what the Fisher information and the KL divergence need of them."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


@runtime_checkable
class Likelihood(Protocol):
    """Any object with this method will do."""

    def hessian(self, f: Tensor) -> Tensor:
        """``H``: for each input the expected Hessian of ``-log p(y | f)``, ``(n, o, o)``."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """``y ~ N(f, noise I)``; ``noise`` is a variance."""

    noise: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.noise < float("inf"):
            raise ValueError(f"a Gaussian's noise is a variance and must be a positive number, not {self.noise}")

    def hessian(self, f: Tensor) -> Tensor:
        """``I / noise``."""
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f), -1, -1) / self.noise

    def kl(self, f: Tensor, g: Tensor) -> Tensor:
        """``KL(p(. | f) || p(. | g))`` summed over inputs: ``|f - g|^2 / (2 noise)``."""
        return (f - g).square().sum() / (2 * self.noise)


@dataclass(frozen=True)
class Categorical:
    """Classes with logits f."""

    def hessian(self, f: Tensor) -> Tensor:
        """``diag(p) - p p^T``: singular, since adding a constant to all logits changes nothing."""
        p = f.softmax(1)
        return torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)

    def kl(self, f: Tensor, g: Tensor) -> Tensor:
        return F.kl_div(g.log_softmax(1), f.log_softmax(1), reduction="sum", log_target=True)


@dataclass(frozen=True)
class Bernoulli:
    """Independent yes-or-no outputs with logits f."""

    def hessian(self, f: Tensor) -> Tensor:
        """``diag(p (1 - p))``."""
        return torch.diag_embed(f.sigmoid() * (-f).sigmoid())

    def kl(self, f: Tensor, g: Tensor) -> Tensor:
        yes = f.sigmoid() * (F.logsigmoid(f) - F.logsigmoid(g))
        no = (-f).sigmoid() * (F.logsigmoid(-f) - F.logsigmoid(-g))
        return (yes + no).sum()


@dataclass(frozen=True)
class Poisson:
    """Counts with log rates f."""

    def hessian(self, f: Tensor) -> Tensor:
        """``diag(exp f)``."""
        return torch.diag_embed(f.exp())

    def kl(self, f: Tensor, g: Tensor) -> Tensor:
        return (f.exp() * (f - g) - f.exp() + g.exp()).sum()


NAMED = {"gaussian": Gaussian, "categorical": Categorical, "bernoulli": Bernoulli, "poisson": Poisson}


def as_likelihood(likelihood: "Likelihood | str") -> Likelihood:
    """A name, or an object that gives ``H``."""
    if isinstance(likelihood, str):
        if likelihood not in NAMED:
            raise ValueError(f"likelihood is one of {', '.join(map(repr, NAMED))} or an object, not {likelihood!r}")
        named: Likelihood = NAMED[likelihood]()
        return named
    if not isinstance(likelihood, Likelihood):
        raise TypeError(
            f"a likelihood has a method hessian(f) that returns (n, o, o); {type(likelihood).__name__} has none"
        )
    return likelihood
