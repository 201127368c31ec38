"""Vectors, options, priors and likelihoods that do not fit: the kind of error, and what it says."""

import pytest
import torch
from torch import nn

import tangents as tg
from cases import case
from networks import plain

every_way = pytest.mark.parametrize("way", ["factored", "implicit", "dense", "auto"])


@every_way
@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(92),
        torch.ones(94),
        torch.ones(94, 2),
        torch.ones(93, 2, 2),
        torch.tensor(1.0),
    ],
    ids=lambda t: str(tuple(t.shape)),
)
def test_vectors_of_the_wrong_shape_for_parameters(wrong, way):
    model, X = case("mlp").build()
    lin = tg.linearize(model, way=way)
    for operator in (lin.jacobian(X), lin.fisher(X, "categorical")):
        with pytest.raises(ValueError, match="93"):
            operator @ wrong.double()


@every_way
@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(14),
        torch.ones(5, 3),
        torch.ones(16, 2),
        torch.ones(15, 2, 2),
        torch.tensor(1.0),
    ],
    ids=lambda t: str(tuple(t.shape)),
)
def test_vectors_of_the_wrong_shape_for_outputs(wrong, way):
    model, X = case("mlp").build()
    lin = tg.linearize(model, way=way)
    for operator in (lin.jacobian(X).T, lin.kernel(X)):
        with pytest.raises(ValueError, match="15"):
            operator @ wrong.double()


@pytest.mark.parametrize("wrong", [[1.0] * 93, 2.0, "v"], ids=["list", "number", "text"])
def test_vectors_that_are_no_tensors(wrong):
    model, X = case("mlp").build()
    with pytest.raises(TypeError, match=r"(?i)tensor"):
        tg.linearize(model).jacobian(X) @ wrong


def test_vectors_of_a_wrong_dtype():
    model, X = case("mlp").build()
    J = tg.linearize(model).jacobian(X)
    for dtype in (torch.complex128, torch.int64):
        with pytest.raises((TypeError, ValueError), match="float"):
            J @ torch.ones(93, dtype=dtype)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"way": "factor"}, "factored"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "large"}, "auto"),
        ({"memory_limit": -1}, "memory_limit"),
    ],
    ids=str,
)
def test_options_out_of_range(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        tg.linearize(plain.mlp(), **options)


def test_an_output_that_does_not_exist():
    model, X = case("mlp").build()
    with pytest.raises(ValueError, match="3"):
        tg.linearize(model, outputs=7).jacobian(X).to_dense()


def test_what_is_no_network():
    with pytest.raises(TypeError, match="Module"):
        tg.linearize(lambda x: x)


def test_a_network_without_parameters():
    with pytest.raises(ValueError, match=r"(?i)parameter"):
        tg.linearize(nn.ReLU())


@pytest.mark.parametrize(
    "prior, match",
    [
        (lambda: tg.priors.Diagonal(torch.ones(92)), "93"),
        (lambda: tg.priors.Diagonal(-torch.ones(93)), "at least 0"),
        (lambda: tg.priors.Scalar(-1.0), "at least 0"),
        (lambda: tg.priors.Groups({"2.wieght": 1.0}), "2.wieght"),
        (lambda: tg.priors.Kronecker({"2.wieght": (torch.eye(6), torch.eye(6))}), "2.wieght"),
        (lambda: tg.priors.Kronecker({"2.weight": (torch.eye(5), torch.eye(6))}), "(?s)6"),
        (lambda: "flat", "(?i)prior"),
    ],
    ids=["short", "negative", "negative scale", "no group", "no parameter", "factor", "text"],
)
def test_priors_that_do_not_fit(prior, match):
    model, X = case("mlp").build()
    with pytest.raises((ValueError, TypeError), match=match):
        tg.linearize(model).kernel(X, prior=prior()).to_dense()


def test_kernels_between_networks_of_different_architectures():
    model, X = case("mlp").build()
    other = tg.linearize(plain.mlp(h=7).double())
    with pytest.raises(ValueError, match=r"(?i)weight|shape|architecture"):
        tg.linearize(model).kernel(X, X, other=other).to_dense()


def test_kernels_between_different_choices_of_parameters():
    model, X = case("mlp").build()
    with pytest.raises(ValueError, match=r"(?i)parameter"):
        tg.linearize(model).kernel(X, X, other=tg.linearize(model, "*.weight")).to_dense()


def test_a_cross_kernel_has_no_spectrum():
    model, X = case("mlp").build()
    with pytest.raises(ValueError, match=r"(?i)square|symmetric"):
        tg.linearize(model).kernel(X, X[:3]).eigh(2)


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan")])
def test_noise_that_is_no_variance(noise):
    with pytest.raises(ValueError, match=r"(?i)noise"):
        tg.likelihoods.Gaussian(noise=noise)
