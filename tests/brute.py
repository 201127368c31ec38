"""Jacobians, kernels and Fisher information by brute force: plain autograd, one row at a time.

Nothing here comes from the library. Rows are input-major, columns follow `named_parameters()`, in
which a tied weight appears once.
"""

import contextlib

import torch
import torch.nn.functional as F


@contextlib.contextmanager
def evaluating(model):
    """The model in eval mode, each of its modules left in the mode in which it was found."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def call(model, X):
    """A dict goes in by keyword, a tuple by position, anything else as the one argument."""
    if isinstance(X, dict):
        return model(**X)
    return model(*X) if isinstance(X, tuple) else model(X)


def outputs(model, X, select=None):
    """The network's outputs in eval mode as a matrix `(n, o)`."""
    with evaluating(model):
        f = call(model, X)
    if select is not None:
        f = select(f)
    return f.reshape(f.shape[0], -1)


def chosen(model, names=None):
    """The parameters behind the columns: all that require grad, or those named."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if (parameter.requires_grad if names is None else name in names)
    }


def jacobian(model, X, names=None, select=None):
    """The Jacobian `(n*o, p)`, one backward pass for each output of each input.

    `backward()` and not `torch.autograd.grad`, because a re-entrant checkpoint refuses the latter.
    """
    parameters = chosen(model, names)
    before = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    rows = []
    try:
        for p in parameters.values():
            p.requires_grad_(True)
        f = outputs(model, X, select).flatten()
        for output in f:
            for p in model.parameters():
                p.grad = None
            output.backward(retain_graph=True)
            rows.append(torch.cat([gradient(p) for p in parameters.values()]))
    finally:
        for p, (required, grad) in before.items():
            p.requires_grad_(required)
            p.grad = grad
    return torch.stack(rows)


def gradient(parameter):
    """The gradient as a vector; zero where the output does not depend on the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(parameter).flatten()
    gradient = parameter.grad.detach()
    return (gradient.to_dense() if gradient.is_sparse else gradient.clone()).flatten()


def kernel(J, S=None, J2=None):
    """`J S J2^T` in float64; `S` is a matrix `(p, p)`, or the identity."""
    J = J.double()
    J2 = J if J2 is None else J2.double()
    return J @ J2.T if S is None else J @ S.double() @ J2.T


def negative_log_likelihood(likelihood, f, noise=1.0):
    """`-log p(y | f)` of one input, at some `y` that its Hessian does not depend on."""
    if likelihood == "gaussian":
        return 0.5 * ((f - 0.3) ** 2).sum() / noise
    if likelihood == "categorical":
        return -F.log_softmax(f, dim=0)[0]
    if likelihood == "bernoulli":
        return F.binary_cross_entropy_with_logits(f, torch.ones_like(f), reduction="sum")
    if likelihood == "poisson":
        return (f.exp() - 2 * f).sum()
    raise ValueError(likelihood)


def hessians(likelihood, f, noise=1.0):
    """`H` of each input, `(n, o, o)`, by differentiating the likelihood twice."""
    f = f.detach().double()
    return torch.stack(
        [torch.autograd.functional.hessian(lambda g: negative_log_likelihood(likelihood, g, noise), f_i) for f_i in f]
    )


def fisher(J, H):
    """`sum_i J_i^T H_i J_i` in float64, from `J` of shape `(n*o, p)` and `H` of `(n, o, o)`."""
    n, o, _ = H.shape
    J = J.double().reshape(n, o, -1)
    return torch.einsum("iap,iab,ibq->pq", J, H.double(), J)


def error(found, expected):
    """Relative error in the Frobenius norm."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    assert torch.isfinite(found).all()
    return ((found - expected).norm() / expected.norm().clamp_min(1e-300)).item()
