"""Priors beside the matrices `S` that they stand for: what a kernel with a prior is compared with."""

import torch

import tangents as tg


def spd(size, generator):
    A = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return A @ A.T / size + 0.3 * torch.eye(size, dtype=torch.float64)


def scalar_prior(parameters, generator):
    p = sum(q.numel() for q in parameters.values())
    return tg.priors.Scalar(0.7), 0.7 * torch.eye(p, dtype=torch.float64)


def diagonal_prior(parameters, generator):
    p = sum(q.numel() for q in parameters.values())
    variances = 0.2 + torch.rand(p, generator=generator, dtype=torch.float64)
    return tg.priors.Diagonal(variances), torch.diag(variances)


def group_prior(parameters, generator):
    """Biases and weights of different scales, whatever else there is of a third."""

    def scale(name):
        return 2.5 if "bias" in name else 0.4 if "weight" in name else 1.7

    scales = torch.cat([torch.full((q.numel(),), scale(name), dtype=torch.float64) for name, q in parameters.items()])
    prior = {"*bias*": 2.5, "*weight*": 0.4}
    others = {name: 1.7 for name in parameters if "bias" not in name and "weight" not in name}
    kept = {pattern: s for pattern, s in prior.items() if any(pattern.strip("*") in name for name in parameters)}
    return tg.priors.Groups(kept | others), torch.diag(scales)


def kronecker_prior(parameters, generator):
    """Two factors for each weight with at least two axes; the rest has the default scale."""
    factors, blocks = {}, []
    for name, q in parameters.items():
        if q.ndim < 2:
            blocks.append(1.3 * torch.eye(q.numel(), dtype=torch.float64))
            continue
        B, A = spd(q.shape[0], generator), spd(q[0].numel(), generator)
        factors[name] = B, A
        blocks.append(torch.kron(B, A))
    return tg.priors.Kronecker(factors, default=1.3), torch.block_diag(*blocks)


PRIORS = {
    "scalar": scalar_prior,
    "diagonal": diagonal_prior,
    "groups": group_prior,
    "Kronecker": kronecker_prior,
}
