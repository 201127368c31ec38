"""Linearise a trained PyTorch network; use its Jacobian as the features of a Bayesian linear model."""

from importlib.metadata import PackageNotFoundError, version

from tangents import likelihoods, priors
from tangents.errors import LinearizationError
from tangents.linearize import Linearization, linearize
from tangents.parameters import last_layers

try:
    __version__ = version("tangents")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["Linearization", "LinearizationError", "last_layers", "likelihoods", "linearize", "priors"]
