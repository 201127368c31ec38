"""Claim: an exact Fisher-vector product costs little more than the paper's approximate one, less than the exact peers.

Products repeat on the same data, as Lanczos and conjugate gradients take them; the likelihood is categorical.
"""

import copy
from collections.abc import Callable
from functools import partial

from torch import Tensor

from benchmarks import networks, ours, peers
from benchmarks.harness import Case, Contestant, Job, Settings, Target

EPSILON = 3e-3  # of the finite differences: the least wrong in float32, of 1e-3, 3e-3, 1e-2, 3e-2 and 1e-1


def resnet20(settings: Settings) -> Case:
    n = settings.pick(128, 16, 2)
    model = networks.resnet20(settings.data).to(settings.device)
    X = networks.cifar10_test(settings.data, n)[0].to(settings.device)
    v = networks.normal(269_722, seed=2).to(settings.device)

    def reference() -> Tensor:
        exact = peers.double_backward_fisher(copy.deepcopy(model).double(), X.double(), keep_graph=False)
        return exact(v.double())

    def peer(make: Callable[..., Callable[[Tensor], Tensor]]) -> Callable[[], Tensor]:
        product = make(model, X)
        return lambda: product(v)

    kept, rebuilt = "double backward, graph kept", "double backward, as the paper's code"
    curvlinops, differences = "curvlinops GGN", "finite differences of the KL"
    return Case(
        contestants=[
            Contestant(
                "tangents",
                partial(ours.fisher_product, model, X, v),
                role="ours",
                planned=partial(ours.stated_peak, model, X, "fisher"),
            ),
            Contestant(kept, partial(peer, partial(peers.double_backward_fisher, keep_graph=True))),
            Contestant(rebuilt, partial(peer, partial(peers.double_backward_fisher, keep_graph=False))),
            Contestant(curvlinops, partial(peer, peers.curvlinops_fisher), package="curvlinops"),
            Contestant(differences, partial(peer, partial(peers.finite_difference_fisher, epsilon=EPSILON))),
        ],
        targets=[
            Target(kept, at_least=2.5),
            Target(rebuilt, at_least=2.5),
            Target(curvlinops, at_least=1.3),
            Target(differences, at_most=1.3),
        ],
        reference=reference,
        facts={"inputs": n, "outputs": 10, "parameters": 269_722, "dtype": "float32", "epsilon": EPSILON},
    )


JOBS = [
    Job(
        "fisher-resnet20",
        "F @ v, categorical, ResNet-20, batch 128",
        resnet20,
        files=(networks.RESNET20, *networks.CIFAR10_TEST),
        packages=("safetensors", "PIL"),
        rounds=15,
    )
]
