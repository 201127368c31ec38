"""``F = J^T H J``, summed over inputs: the Fisher information, also the generalised Gauss-Newton matrix."""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from tangents.errors import NonFinite
from tangents.jacobian.operator import Jacobian, Operator
from tangents.likelihoods import Likelihood, as_likelihood
from tangents.network import Watch
from tangents.precision import wide

STEPS = {torch.float64: (1e-4, 1e-5, 1e-6), torch.float32: (3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3)}
PROBED = 8  # inputs on which the step is chosen
POOR = 0.05  # relative error from which on a step is warned of


class Fisher(Operator):
    """``F = sum_i J_i^T H_i J_i``, ``(p, p)``: products exactly, or by the paper's finite differences."""

    _name = "F"

    def __init__(
        self, jacobian: Jacobian, likelihood: Likelihood | str, method: str = "exact", epsilon: float | str = "auto"
    ) -> None:
        self.jacobian, self.likelihood = jacobian, as_likelihood(likelihood)
        if method not in ("exact", "finite-difference"):
            raise ValueError(f"method is 'exact' or 'finite-difference', not {method!r}")
        if method == "finite-difference" and not callable(getattr(self.likelihood, "kl", None)):
            raise TypeError(
                f"finite differences need the likelihood's kl(f, g), which {type(self.likelihood).__name__} does not "
                "have: add it, or use method='exact'"
            )
        if epsilon != "auto" and not (isinstance(epsilon, float | int) and 0 < epsilon < float("inf")):
            raise ValueError(f"epsilon is 'auto' or a positive number, not {epsilon!r}")
        self.method = method
        self._epsilon = None if epsilon == "auto" else float(epsilon)
        self.shape = (jacobian.shape[1], jacobian.shape[1])
        self.dtype, self.device = jacobian.dtype, jacobian.device

    @property
    def T(self) -> "Fisher":
        return self

    def _product(self, V: Tensor) -> Tensor:
        if self.method == "exact":
            return self._exact(V)
        self.jacobian.check_unchanged()
        return torch.stack([self._finite_difference(V[:, j]) for j in range(V.shape[1])], 1)

    def _explain_non_finite(self) -> None:
        self.jacobian._explain_non_finite()

    def _exact(self, V: Tensor) -> Tensor:
        """``J v``, then ``H``, then ``J^T``, batch by batch: each batch is visited once."""
        total: Tensor | None = None
        for block in self.jacobian.blocks():
            value = self.jacobian.use(block, lambda b: b.vjp(self._weighted(b.outputs, b.jvp(V))))
            total = value if total is None else wide(total) + value
        assert total is not None
        return total.to(V.dtype)

    def _weighted(self, outputs: Tensor, JV: Tensor) -> Tensor:
        H = self.likelihood.hessian(outputs).to(JV.dtype)
        n, o = outputs.shape
        if H.shape != (n, o, o):
            raise ValueError(
                f"the likelihood's hessian(f) must return {(n, o, o)} for f of shape {(n, o)}; got {tuple(H.shape)}"
            )
        return H @ JV

    # ------------------------------------------------------------------------------------------- finite differences

    @property
    def epsilon(self) -> float:
        """The step of the finite differences: that of a few whose product is nearest the exact one on a few inputs."""
        if self._epsilon is None:
            self._epsilon = self._choose_step()
        return self._epsilon

    def _finite_difference(
        self, v: Tensor, epsilon: float | None = None, batches: Callable[[], object] | None = None
    ) -> Tensor:
        """``F v = |v| / eps * d/dtheta' sum KL(p(f(theta)) || p(f(theta')))`` at ``theta' = theta + eps v / |v|``:
        one forward and one backward pass (the paper's eq. for ``grad KL``, corrected for the norm of v)."""
        network, norm = self.jacobian.network, float(v.norm())
        if norm == 0:
            return torch.zeros_like(v)
        step = self.epsilon if epsilon is None else epsilon
        direction = network.columns.unflatten(v / norm)
        total = torch.zeros_like(v)
        start = 0
        for batch in self.jacobian.inputs.batches(self.jacobian.plan.batch) if batches is None else batches():  # type: ignore[attr-defined]
            with torch.no_grad():
                f = network(batch, offset=start)
                moved = {
                    k: (p + step * direction[k].to(p.dtype)).requires_grad_() for k, p in network.parameters.items()
                }
            with torch.enable_grad():
                padding = Watch({id(moved[k]): p for k, p in network.parameters.items()})
                g = network(batch, padding, parameters=moved, offset=start)
                divergence = self.likelihood.kl(f, g)  # type: ignore[attr-defined]
                gradients = torch.autograd.grad(
                    divergence, list(moved.values()), materialize_grads=True, allow_unused=True
                )
            total += torch.cat([g.reshape(-1) for g in gradients]).to(v.dtype)
            start += len(f)
        return total * (norm / step)

    def _choose_step(self) -> float:
        few = self.jacobian.inputs.first(PROBED)
        network = self.jacobian.network
        v = torch.randn(self.shape[0], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        v = v.to(self.device, network.dtype)
        block = self.jacobian._block(few, 0, self.jacobian.plan.way)
        exact = block.vjp(self._weighted(block.outputs, block.jvp(v.unsqueeze(1)))).squeeze(1).detach()
        errors: dict[float, float] = {}
        for step in STEPS.get(network.dtype, STEPS[torch.float32]):
            try:
                error = float((self._finite_difference(v, step, lambda: [few]) - exact).norm() / exact.norm())
            except NonFinite:  # too large a step for this network
                continue
            if math.isfinite(error):
                errors[step] = error
        if not errors:
            raise NonFinite("no step of the finite differences gives finite products: use method='exact'")
        best = min(errors, key=lambda step: errors[step])
        if errors[best] > POOR:
            warnings.warn(
                f"the best step of the finite differences, {best:g}, is off by {errors[best]:.0%} on a few inputs: "
                "method='exact' is right to rounding",
                stacklevel=2,
            )
        return best
