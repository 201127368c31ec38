"""What can be wrong with an input, as exceptions that say what to do about it.

All are ``ValueError``: a caller who catches those catches every one of ours.
"""


class LinearizationError(ValueError):
    """The network cannot be linearised as asked."""


class ParametersChanged(LinearizationError):
    """The user's parameters are no longer the ones that were linearised."""


class MixesSamples(LinearizationError):
    """One input's output depends on the other inputs of its batch, so that no row of J is well defined."""


class RandomOutputs(LinearizationError):
    """The network gives another output each time that it is called, in eval mode too."""


class NoDerivative(LinearizationError):
    """The outputs do not depend on the chosen parameters through operations that have a derivative."""


class NonFinite(LinearizationError):
    """The network's outputs hold NaN or infinity."""
