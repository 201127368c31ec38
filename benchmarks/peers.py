"""The baselines: what people do today for the same products, each in its best way.

All take a module in eval mode and its inputs (a tensor, or a dict of keyword arguments). Outputs are `(n, o)`,
parameters those that require grad, in the order of `named_parameters()`; rows of the Jacobian J are input-major.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

Inputs = Any  # Tensor | dict[str, Tensor]


def apply(model: nn.Module, X: Inputs) -> Tensor:
    return model(**X) if isinstance(X, dict) else model(X)


def count(X: Inputs) -> int:
    return len(next(iter(X.values()))) if isinstance(X, dict) else len(X)


def take(X: Inputs, rows: slice) -> Inputs:
    return {name: x[rows] for name, x in X.items()} if isinstance(X, dict) else X[rows]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def unflat(v: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """A flat vector as named tensors of the parameters' shapes."""
    params = trained(model)
    parts = v.split([p.numel() for p in params.values()])
    return {name: part.view_as(p) for (name, p), part in zip(params.items(), parts, strict=True)}


# ---------------------------------------------------------------- K @ u


def double_backward_product(model: nn.Module, X: Inputs) -> Callable[[Tensor], Tensor]:
    """The paper's `K @ u`, made faster: one graph for every product, one backward and one double backward a column.

    `w = J^T u` is linear in u, so `J w` is the gradient of `<w(u), w>` with respect to u. The paper's code takes a
    further backward pass for `J^T u` itself and rebuilds the graph for every column; this shares both.
    """
    params = list(trained(model).values())

    def product(u: Tensor) -> Tensor:
        out = apply(model, X)
        columns = []
        for column in u.reshape(len(u), -1).unbind(1):
            cotangent = column.reshape(out.shape).clone().requires_grad_()
            w = torch.autograd.grad(out, params, cotangent, create_graph=True, allow_unused=True)
            w = [part for part in w if part is not None]
            columns.append(torch.autograd.grad(w, cotangent, [part.detach() for part in w], retain_graph=True)[0])
        return torch.stack([c.reshape(-1) for c in columns], 1).reshape(u.shape).detach()

    return product


def double_backward_as_published(model: nn.Module, X: Inputs) -> Callable[[Tensor], Tensor]:
    """The paper's `K @ u` as it is described: three backward passes, one for `w = J^T u` and two for `J w`, each of the
    two from a forward pass of its own, column by column."""
    params = list(trained(model).values())

    def product(u: Tensor) -> Tensor:
        columns = []
        for column in u.reshape(len(u), -1).unbind(1):
            out = apply(model, X)
            w = torch.autograd.grad(out, params, column.reshape(out.shape))
            out = apply(model, X)
            dummy = torch.zeros_like(out, requires_grad=True)
            parts = torch.autograd.grad(out, params, dummy, create_graph=True)
            columns.append(torch.autograd.grad(parts, dummy, w)[0].reshape(-1))
        return torch.stack(columns, 1).reshape(u.shape)

    return product


def forward_mode_product(model: nn.Module, X: Inputs) -> Callable[[Tensor], Tensor]:
    """`K @ u` by torch.func: `vjp`, then `jvp`; the columns of u batched by `vmap`."""
    params = {name: p.detach() for name, p in trained(model).items()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return call_with(model, values, X)

    def product(u: Tensor) -> Tensor:
        out, pull = vjp(outputs, params)

        def one(column: Tensor) -> Tensor:
            return jvp(outputs, (params,), pull(column.reshape(out.shape)))[1].reshape(-1)

        return one(u) if u.ndim == 1 else vmap(one, in_dims=1, out_dims=1)(u)

    return product


# ---------------------------------------------------------------- rows of J, dense K, diagonal


def call_with(model: nn.Module, values: dict[str, Tensor], X: Inputs) -> Tensor:
    return functional_call(model, values, (), X) if isinstance(X, dict) else functional_call(model, values, (X,))


def per_input(model: nn.Module, reduce: Callable[[list[Tensor]], Tensor]) -> Callable[[Inputs], Tensor]:
    """`vmap(jacrev)`: for each input of a batch, `reduce` of its `(o, p)` rows, parameter by parameter."""
    params = {name: p.detach() for name, p in trained(model).items()}

    def one(x: Inputs) -> Tensor:
        x = {name: part[None] for name, part in x.items()} if isinstance(x, dict) else x[None]
        rows = jacrev(lambda values: call_with(model, values, x)[0])(params)
        return reduce([r.flatten(1) for r in rows.values()])

    return vmap(one)


def rows(model: nn.Module, X: Inputs, chunk: int) -> Tensor:
    """J as a dense `(n*o, p)` matrix by `vmap(jacrev)`, `chunk` inputs at a time, written into one allocation."""
    n, p = count(X), sum(q.numel() for q in trained(model).values())
    batched = per_input(model, lambda parts: torch.cat(parts, 1))
    J = None
    for start in range(0, n, chunk):
        part = batched(take(X, slice(start, start + chunk)))
        if J is None:
            J = part.new_empty(n, part.shape[1], p)
        J[start : start + chunk] = part
    return J.view(-1, p)


def backward_rows(model: nn.Module, X: Inputs) -> Tensor:
    """J by one backward pass a row, for networks that `vmap` cannot batch; written into one allocation."""
    params = list(trained(model).values())
    J = None
    for i in range(count(X)):
        out = apply(model, take(X, slice(i, i + 1)))[0]
        for c in range(len(out)):
            row = flat(torch.autograd.grad(out[c], params, retain_graph=True, materialize_grads=True))
            if J is None:
                J = row.new_empty(count(X) * len(out), len(row))
            J[i * len(out) + c] = row
    return J


def rows_kernel(model: nn.Module, X: Inputs, chunk: int) -> Tensor:
    """Dense K by `vmap(jacrev)` rows, then `J @ J.T`."""
    J = rows(model, X, chunk)
    return J @ J.T


def lower_tiles_product(J: Tensor, tile: int, out: Tensor | None = None) -> Tensor:
    """`J @ J.T` by the row blocks of its lower triangle only, mirrored at the end (or added to `out`, not mirrored)."""
    n = len(J)
    K = J.new_zeros(n, n) if out is None else out
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        K[start:stop, :stop].addmm_(J[start:stop], J[:stop].T)
    return mirrored(K) if out is None else K


def mirrored(K: Tensor) -> Tensor:
    """The symmetric matrix whose lower triangle is K's."""
    return K.tril() + K.tril(-1).T


def best_tile(J: Tensor, sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> int:
    """The fastest height of a row block for this J on this machine, each tried twice."""
    trials: dict[int, float] = {}
    for tile in {min(size, len(J)) for size in sizes}:
        for _ in range(2):
            if J.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            lower_tiles_product(J, tile)
            if J.is_cuda:
                torch.cuda.synchronize()
            trials[tile] = min(trials.get(tile, float("inf")), time.perf_counter() - start)
    return min(trials, key=trials.__getitem__)


def loop_diagonal(model: nn.Module, X: Inputs) -> Tensor:
    """The diagonal of K as in the paper's code: a loop over inputs, and over outputs, one gradient at a time."""
    params = list(trained(model).values())
    diagonal = []
    for i in range(count(X)):
        out = apply(model, take(X, slice(i, i + 1)))[0]
        for c in range(len(out)):
            gradient = flat(torch.autograd.grad(out[c], params, retain_graph=c + 1 < len(out)))
            diagonal.append(gradient.norm() ** 2)
    return torch.stack(diagonal)


def rows_diagonal(model: nn.Module, X: Inputs, chunk: int) -> Tensor:
    """The diagonal of K by `vmap(jacrev)`: each chunk's rows are squared and summed, then dropped."""
    batched = per_input(model, lambda parts: torch.stack([part.square().sum(1) for part in parts]).sum(0))
    n = count(X)
    return torch.cat([batched(take(X, slice(s, s + chunk))).reshape(-1) for s in range(0, n, chunk)])


# ---------------------------------------------------------------- F @ v, categorical, summed over inputs


def detached_entropy(logits: Tensor) -> Tensor:
    """`-sum p log p` with `p` outside the differentiation: its Hessian in the parameters is the Fisher information."""
    return -(logits.softmax(1).detach() * logits.log_softmax(1)).sum()


def double_backward_fisher(model: nn.Module, X: Inputs, keep_graph: bool) -> Callable[[Tensor], Tensor]:
    """The paper's exact product: the gradient of the detached entropy with its graph, times v, differentiated again.

    With `keep_graph` the graph is built once and every product is one backward pass through it; without, the forward
    pass and the gradient are taken anew for every product, as the paper's code does.
    """
    params = list(trained(model).values())

    def gradient() -> list[Tensor]:
        return list(torch.autograd.grad(detached_entropy(apply(model, X)), params, create_graph=True))

    kept = gradient() if keep_graph else None

    def product(v: Tensor) -> Tensor:
        parts = list(unflat(v, model).values())
        return flat(torch.autograd.grad(kept or gradient(), params, parts, retain_graph=keep_graph))

    return product


def finite_difference_fisher(model: nn.Module, X: Inputs, epsilon: float) -> Callable[[Tensor], Tensor]:
    """The paper's fast product: the gradient of the KL at `theta' = theta + epsilon v / |v|`, times `|v| / epsilon`.

    The gradient of the summed KL is that of the cross entropy against the probabilities at theta, which are kept.
    """
    params = {name: p.detach() for name, p in trained(model).items()}
    with torch.no_grad():
        target = apply(model, X).softmax(1)

    def product(v: Tensor) -> Tensor:
        norm = v.norm()
        step = unflat(v * (epsilon / norm), model)
        moved = {name: (p + step[name]).requires_grad_() for name, p in params.items()}
        divergence = -(target * call_with(model, moved, X).log_softmax(1)).sum()
        return flat(torch.autograd.grad(divergence, list(moved.values()))) * (norm / epsilon)

    return product


def curvlinops_fisher(model: nn.Module, X: Tensor) -> Callable[[Tensor], Tensor]:
    """curvlinops' generalised Gauss-Newton of the summed cross entropy: the Fisher information of a categorical.

    It does not depend on the labels, so any will do.
    """
    from curvlinops import GGNLinearOperator

    labels = torch.zeros(len(X), dtype=torch.long, device=X.device)
    loss = nn.CrossEntropyLoss(reduction="sum")
    params = list(trained(model).values())
    G = GGNLinearOperator(model, loss, params, [(X, labels)], check_deterministic=False, num_data=len(X))
    return lambda v: G @ v
