"""Claim: a product with the kernel costs batched matrix products, not passes through the network.

The network is that of the paper's speed figure. The paper multiplies by double backward, torch.func by `vjp` and `jvp`.
"""

import copy
from functools import partial

from torch import Tensor

from benchmarks import networks, ours, peers
from benchmarks.harness import Case, Contestant, Job, Settings, Target


def case(settings: Settings, columns: int) -> Case:
    """`K @ u` with one column or several. All times are for one column."""
    n = settings.pick(5000, 300, 4)
    model = networks.mlp().to(settings.device)
    X = networks.normal(n, 5).to(settings.device)
    u = networks.normal(n, columns, seed=2).to(settings.device)
    u = u[:, 0] if columns == 1 else u

    def reference() -> Tensor:
        exact = peers.double_backward_product(copy.deepcopy(model).double(), X.double())
        return exact(u.double())

    def peer(make: object) -> object:
        product = make(model, X)
        return lambda: product(u)

    return Case(
        contestants=[
            Contestant(
                "tangents",
                partial(ours.kernel_product, model, X, u),
                role="ours",
                units=columns,
                planned=partial(ours.stated_peak, model, X, "product", columns=columns),
            ),
            Contestant("double backward", partial(peer, peers.double_backward_as_published), units=columns),
            Contestant(
                "double backward, one graph shared", partial(peer, peers.double_backward_product), units=columns
            ),
            Contestant("torch.func vjp, jvp", partial(peer, peers.forward_mode_product), units=columns),
        ],
        targets=[Target("double backward", at_least=4 if columns == 1 else 10)],
        reference=reference,
        facts={"inputs": n, "outputs": 1, "parameters": 803_601, "columns": columns, "dtype": "float32"},
    )


JOBS = [
    Job("product-mlp", "K @ v, MLP, n = 5,000", partial(case, columns=1), rounds=25),
    Job("product-mlp-16", "K @ V, MLP, n = 5,000, 16 columns (times of one column)", partial(case, columns=16)),
]
