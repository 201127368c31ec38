"""Claim: all prior variances (the kernel's diagonal) without a loop over inputs and without the Jacobian's rows."""

import copy
from functools import partial

import torch
from torch import Tensor

from benchmarks import networks, ours, peers
from benchmarks.harness import Case, Contestant, Job, Settings, Target


def resnet20(settings: Settings) -> Case:
    n = settings.pick(1000, 20, 2)
    model = networks.resnet20(settings.data).to(settings.device)
    X = networks.cifar10_test(settings.data, n)[0].to(settings.device)
    chunk = settings.on(cpu=8, cuda=50)
    known = min(n, 50)

    def reference() -> Tensor:
        return peers.loop_diagonal(copy.deepcopy(model).double(), X[:known].double())

    loop, rows = "loop over inputs", "vmap(jacrev)"
    return Case(
        contestants=[
            Contestant(
                "tangents",
                partial(ours.kernel_diagonal, model, X, torch.float32),
                role="ours",
                planned=partial(ours.stated_peak, model, X, "diagonal"),
            ),
            Contestant("tangents, in float64", partial(ours.kernel_diagonal, model, X, torch.float64), role="ours"),
            Contestant(loop, lambda: partial(peers.loop_diagonal, model, X)),
            Contestant(rows, lambda: partial(peers.rows_diagonal, model, X, chunk)),
        ],
        targets=[
            Target(loop, at_least=10),
            Target(rows, at_least=2),
            Target(rows, at_least=3, stretch=True),
        ],
        reference=reference,
        part=lambda diagonal: diagonal[: 10 * known],
        facts={"inputs": n, "outputs": 10, "parameters": 269_722, "dtype": "float32"},
    )


JOBS = [
    Job(
        "diagonal-resnet20",
        "kernel diagonal, ResNet-20, n = 1,000",
        resnet20,
        files=(networks.RESNET20, *networks.CIFAR10_TEST),
        packages=("safetensors", "PIL"),
        rounds=3,
        budget_s=300,
    )
]
