"""A network linearised at its weights: ``f(x; theta + delta) = f(x; theta) + J delta``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tangents.checks import check_separates_samples
from tangents.fisher import Fisher
from tangents.inputs import Batch, Inputs, length, read_inputs, signature, tensors
from tangents.jacobian import plan as planning
from tangents.jacobian.factored import Findings
from tangents.jacobian.operator import Jacobian
from tangents.kernel import Kernel
from tangents.likelihoods import Likelihood
from tangents.network import Network, Outputs
from tangents.parameters import Choice
from tangents.priors import Prior


def linearize(
    model: nn.Module,
    params: Choice = None,
    outputs: Outputs = None,
    batch_size: int | str = "auto",
    way: str = "auto",
    memory_limit: int | None = None,
) -> "Linearization":
    """Linearise a network at its present weights, in eval mode. The network itself is left as it is.

    Args:
        model: any ``torch.nn.Module``; compiled and DistributedDataParallel ones are unwrapped.
        params: which parameters make the columns of J: None (all that require grad), glob pattern(s) on their names,
            ``tangents.last_layers(k)``, or a predicate ``(name, parameter) -> bool``.
        outputs: which outputs make the rows: None (all; of a Hugging Face output its logits), an index, a slice, the
            name of a field, or a function from what the network returns to a tensor ``(n, o)``.
        batch_size: inputs taken at a time, or "auto".
        way: "factored", "implicit", "dense", or "auto" for the cheapest (``jacobian(X).plan.explain()`` says why).
        memory_limit: bytes that may be used; by default 60% of what is free.
    """
    if way not in ("auto", *planning.WAYS):
        raise ValueError(f"way is 'auto', 'factored', 'implicit' or 'dense', not {way!r}")
    if batch_size != "auto" and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size is 'auto' or a whole number of at least 1, not {batch_size!r}")
    if memory_limit is not None and not memory_limit > 0:
        raise ValueError(f"memory_limit is a positive number of bytes, not {memory_limit!r}")
    return Linearization(Network(model, params, outputs), batch_size, way, memory_limit)


class Linearization:
    """A network, its chosen parameters, and its products at theta. Made by `linearize`."""

    def __init__(self, network: Network, batch_size: int | str, way: str, memory_limit: int | None) -> None:
        self.network = network
        self._batch_size, self._way, self._memory_limit = batch_size, way, memory_limit
        self._findings = Findings()
        self._counts: dict[Any, planning.Counts] = {}
        self._separate: int = 0  # inputs with which it was checked that samples do not mix

    @property
    def num_params(self) -> int:
        """``p``, the number of chosen parameter entries: the columns of J."""
        return self.network.columns.total

    @property
    def param_names(self) -> list[str]:
        """The chosen parameters, in the order of J's columns; a tied weight under its first name."""
        return list(self.network.columns.names)

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """Named tensors to one vector, in the order of J's columns."""
        return self.network.columns.flatten(named)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector to named tensors, as views."""
        return self.network.columns.unflatten(vector)

    def __call__(self, X: Any) -> Tensor:
        """The network's outputs ``(n, o)``."""
        inputs = self._read(X)
        grad = torch.enable_grad() if inputs.requires_grad else torch.no_grad()
        size = inputs.n if inputs.requires_grad else self._plan(inputs).batch
        parts, start = [], 0
        with grad:
            for batch in inputs.batches(size):
                parts.append(self.network(batch, offset=start))
                start += length(batch)
        result = torch.cat(parts)
        return result if inputs.requires_grad else result.detach()

    def jacobian(self, X: Any) -> Jacobian:
        """J at some inputs, as an operator ``(n * o, p)``: ``J @ v``, ``J.T @ u``, ``J.plan.explain()``."""
        inputs = self._read(X)
        return Jacobian(self.network, inputs, self._plan(inputs), self._findings)

    def kernel(
        self, X: Any, X2: Any = None, prior: Prior | float | None = None, other: "Linearization | None" = None
    ) -> Kernel:
        """``K = J(X) S J(X2)^T``, the finite NTK; X2 defaults to X. ``other`` gives X2's side to another network."""
        left = self.jacobian(X)
        if X2 is None and other is None:
            return Kernel(left, None, prior)
        return Kernel(left, (other or self).jacobian(X if X2 is None else X2), prior)

    def fisher(
        self, X: Any, likelihood: Likelihood | str, method: str = "exact", epsilon: float | str = "auto"
    ) -> Fisher:
        """``F = sum_i J_i^T H_i J_i`` as an operator ``(p, p)``, for a likelihood of the outputs."""
        return Fisher(self.jacobian(X), likelihood, method, epsilon)

    def _read(self, X: Any) -> Inputs:
        self.network.check_unchanged()
        inputs = read_inputs(X)
        if inputs.whole is not None:
            self._refuse_other_device(inputs.whole)
        enough = min(inputs.n, 3)
        if enough > self._separate:
            check_separates_samples(self.network, inputs.first(enough))
            self._separate = enough
        return inputs

    def _refuse_other_device(self, batch: Batch) -> None:
        """Batches that are streamed are moved as they come; what is given whole is the caller's to place."""
        device = self.network.device
        for leaf in tensors(batch):
            if leaf.device != device:
                raise ValueError(
                    f"the network is on {device} and the inputs on {leaf.device}: try X.to({str(device)!r}), or pass a "
                    "DataLoader, whose batches are moved as they come"
                )

    def _plan(self, inputs: Inputs) -> planning.Plan:
        key = (signature(inputs.first(1)), inputs.n.bit_length())
        if key not in self._counts:
            self._counts[key] = planning.count(self.network, inputs, self._findings)
        return planning.make(
            self.network, inputs, self._counts[key], self._findings, self._way, self._batch_size, self._memory_limit
        )
