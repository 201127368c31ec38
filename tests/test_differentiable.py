"""Kernels and products differentiated with respect to the inputs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import brute
import tangents as tg
from brute import error
from cases import case

SMOOTH = (
    "mlp",
    "one number",
    "shared convolution",
    "layer norm of images",
    "group norm",
    "batch norm 2d",
    "rms norm",
    "transformer, norm first",
    "transposed conv2d",
    "tied autoencoder",
    "three times",
    "as many steps as inputs",
    "layer scale and temperature",
    "LSTM batch first",
    "fused attention",
)
WAYS = ("factored", "implicit", "dense", "auto")


def jacobian(model, X):
    """The brute-force Jacobian as a differentiable function of the inputs."""
    rows = []
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        outputs = brute.outputs(model, X).flatten()
    for output in outputs:
        gradients = torch.autograd.grad(output, list(model.parameters()), create_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def gradients(function, *inputs):
    """Of the function's values, weighted at random, with respect to copies of the inputs."""
    inputs = [x.detach().clone().requires_grad_(True) for x in inputs]
    values = function(*inputs)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
    return torch.autograd.grad((values * weights).sum(), inputs)


def vector(size):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMOOTH)
def test_kernel(name, way):
    model, X = case(name).build()
    lin = tg.linearize(model, way=way)
    u = vector(case(name).jacobian().shape[0])

    def dense(X):
        J = jacobian(model, X)
        return J @ J.T

    (expected,) = gradients(dense, X)
    (found,) = gradients(lambda X: lin.kernel(X).to_dense(), X)
    assert error(found, expected) < 1e-9
    (expected,) = gradients(lambda X: dense(X) @ u, X)
    (found,) = gradients(lambda X: lin.kernel(X) @ u, X)
    assert error(found, expected) < 1e-9
    (expected,) = gradients(lambda X: dense(X).diagonal(), X)
    (found,) = gradients(lambda X: lin.kernel(X).diagonal(), X)
    assert error(found, expected) < 1e-9


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMOOTH)
def test_jacobian_products(name, way):
    model, X = case(name).build()
    lin = tg.linearize(model, way=way)
    rows, columns = case(name).jacobian().shape
    v, u = vector(columns), vector(rows)
    for found, expected in (
        (lambda X: lin.jacobian(X) @ v, lambda X: jacobian(model, X) @ v),
        (lambda X: lin.jacobian(X).T @ u, lambda X: jacobian(model, X).T @ u),
        (lambda X: lin.jacobian(X).row_norms_squared(), lambda X: jacobian(model, X).square().sum(1)),
    ):
        assert error(gradients(found, X)[0], gradients(expected, X)[0]) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_cross_kernel_by_both_inputs(way):
    model, X = case("mlp").build()
    _, X2 = case("mlp").build(n=3, seed=4)
    lin = tg.linearize(model, way=way)
    for found, expected in zip(
        gradients(lambda a, b: lin.kernel(a, b).to_dense(), X, X2),
        gradients(lambda a, b: jacobian(model, a) @ jacobian(model, b).T, X, X2),
        strict=True,
    ):
        assert error(found, expected) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_cross_kernel_by_the_new_inputs_only(way):
    """What an acquisition function does: training inputs fixed, candidates moved."""
    model, X = case("mlp").build()
    _, X2 = case("mlp").build(n=3, seed=4)
    lin = tg.linearize(model, way=way)
    fixed = case("mlp").jacobian()
    (found,) = gradients(lambda b: lin.kernel(X, b).to_dense(), X2)
    (expected,) = gradients(lambda b: fixed @ jacobian(model, b).T, X2)
    assert error(found, expected) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_against_finite_differences(way):
    model, X = case("mlp").build(n=2)
    lin = tg.linearize(model, way=way)
    assert torch.autograd.gradcheck(lambda X: lin.kernel(X).to_dense(), X.requires_grad_(True), atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_differentiable(way):
    model, X = case("mlp").build()
    lin = tg.linearize(model, way=way)
    assert error(gradients(lin, X)[0], gradients(model, X)[0]) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_one_entry_of_a_dict(way):
    model, X = case("dict of inputs").build()
    lin = tg.linearize(model, way=way)
    left, right = X["left"], X["right"]

    def dense(left):
        J = jacobian(model, {"left": left, "right": right})
        return J @ J.T

    (found,) = gradients(lambda a: lin.kernel({"left": a, "right": right}).to_dense(), left)
    assert error(found, gradients(dense, left)[0]) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_with_a_prior(way):
    model, X = case("mlp").build()
    lin = tg.linearize(model, way=way)
    variances = vector(lin.num_params).abs() + 0.1

    def dense(X):
        J = jacobian(model, X)
        return J * variances @ J.T

    prior = tg.priors.Diagonal(variances)
    (found,) = gradients(lambda X: lin.kernel(X, prior=prior).to_dense(), X)
    assert error(found, gradients(dense, X)[0]) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_no_graph_where_none_is_asked_for(way):
    model, X = case("mlp").build()
    lin = tg.linearize(model, way=way)
    J, K = lin.jacobian(X), lin.kernel(X)
    results = [
        lin(X),
        J @ vector(93),
        J.T @ vector(15),
        J.to_dense(),
        J.row_norms_squared(),
        K @ vector(15),
        K.to_dense(),
        K.diagonal(),
    ]
    assert not any(result.requires_grad for result in results)
