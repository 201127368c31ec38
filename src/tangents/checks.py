"""What is checked of a network before its derivatives are believed: that it is fixed, that it keeps its inputs apart,
and that all of it is in the copy."""

import torch
from torch.utils._pytree import tree_map

from tangents.errors import LinearizationError, MixesSamples, NonFinite, RandomOutputs
from tangents.inputs import Batch, length, take, tensors
from tangents.network import Network, cloned, gradients, graph_nodes, random_state
from tangents.precision import rounding

_MIXES = (
    "the network mixes samples: an input's output depends on the other inputs of its batch, so its Jacobian row is not "
    "defined (batch statistics, as of a BatchNorm without running statistics, or a mean over the batch?): make the "
    "network treat inputs one by one"
)


def check_separates_samples(network: Network, batch: Batch) -> None:
    """Raise unless each input's output is its own: fixed, and unmoved by the other inputs of its batch.

    Values are compared, the first three inputs alone and together; then, for inputs that have a derivative,
    exact zeros: no other input may have a gradient.
    """
    count = length(batch)
    probe = tree_map(cloned, take(batch, slice(0, min(count, 3))))
    _notice_overwriting(network, probe)
    _refuse_a_second_network(network, probe)
    tolerance = rounding(network.precision) / 10
    with torch.no_grad(), random_state(network.device):
        together = network(probe)
        torch.default_generator.manual_seed(torch.default_generator.initial_seed() + 1)
        if network.device.type == "cuda":
            torch.cuda.default_generators[network.device.index or 0].manual_seed(1)
        again = network(probe)
    if not torch.allclose(together, again, rtol=tolerance, atol=tolerance * float(together.abs().max())):
        raise RandomOutputs(
            "the network gives other outputs when it is called again with the same inputs, in eval mode too: make "
            "its random part (functional dropout with training=True, added noise) follow network.training"
        )
    if count == 1:
        return
    try:
        with torch.no_grad():
            alone = torch.cat([network(take(probe, slice(i, i + 1))) for i in range(together.shape[0])])
    except (RuntimeError, ValueError, TypeError, AssertionError):
        alone = together  # a network exported for one batch size; the gradients below still tell
    if alone.shape != together.shape or not torch.allclose(
        together, alone, rtol=10 * tolerance, atol=10 * tolerance * float(together.abs().max())
    ):
        raise MixesSamples(_MIXES)
    _check_gradients_separate(network, probe)


def check_halves(network: Network, batch: Batch) -> None:
    """Raise if a batch's outputs are others when it is cut in two."""
    half = length(batch) // 2
    with torch.no_grad():
        whole = network(batch)
        parts = torch.cat([network(take(batch, slice(0, half))), network(take(batch, slice(half, None)))])
    if not torch.allclose(whole, parts, rtol=rounding(network.precision), atol=float(whole.abs().max()) * 1e-3):
        raise MixesSamples(_MIXES)


def _refuse_a_second_network(network: Network, probe: Batch) -> None:
    """A forward method replaced on the instance still runs the user's own network, not the copy."""
    with torch.inference_mode(False), torch.enable_grad():
        outputs = network(tree_map(cloned, probe))
    leaves = [node.variable for node in graph_nodes(outputs) if hasattr(node, "variable")]
    own = list(network.model.parameters())
    if any(a is b for a in leaves for b in network.original.parameters() if not any(b is c for c in own)):
        raise LinearizationError(
            "the network runs code that is bound to the original object (was model.forward, or a submodule's, "
            "replaced on the instance, as by model.forward = torch.compile(model.forward)?): put the change in the "
            "class, or compile the module itself with torch.compile(model)"
        )


def _notice_overwriting(network: Network, probe: Batch) -> None:
    """A network that works in place on its inputs is run on copies of them from here on."""
    with torch.inference_mode(False), torch.no_grad():
        scratch = tree_map(cloned, probe)
        before = [leaf._version for leaf in tensors(scratch)]
        network(scratch)
        network.overwrites = before != [leaf._version for leaf in tensors(scratch)]


def _check_gradients_separate(network: Network, probe: Batch) -> None:
    floating = [leaf for leaf in tensors(probe) if leaf.is_floating_point()]
    if not floating:
        return
    with torch.inference_mode(False), torch.enable_grad():
        copies = {id(leaf): leaf.detach().clone().requires_grad_() for leaf in floating}
        result = network(tree_map(lambda leaf: copies.get(id(leaf), leaf), probe))
        if not result.requires_grad:
            return
        try:
            found = torch.autograd.grad(result[0].sum(), list(copies.values()), allow_unused=True)
        except RuntimeError:
            return  # some operation on the way to the inputs has no derivative; the values have been compared
    if any(g is not None and bool(((g[1:] != 0) & ~g[1:].isnan()).any()) for g in found):
        raise MixesSamples(_MIXES)


def refuse_non_finite_derivatives(network: Network, batch: Batch, offset: int = 0) -> None:
    """Name the first input whose own derivatives are not finite."""
    for i in range(length(batch)):
        outputs = network.outputs_with_graph(take(batch, slice(i, i + 1)), offset=offset + i)
        found = gradients(outputs, list(network.parameters.values()), torch.ones_like(outputs))
        if not all(g is None or bool(torch.isfinite(g).all()) for g in found):
            raise NonFinite(
                f"the derivatives at input {offset + i} are not finite though its outputs are: check that input "
                "(infinity, a square root of zero?) and the weights"
            )
