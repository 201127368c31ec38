"""`F = sum_i J_i^T H_i J_i`: exact and by finite differences, for every likelihood."""

import pytest
import torch

import brute
import tangents as tg
from brute import error
from cases import CASES, by_name, case

LIKELIHOODS = ("gaussian", "categorical", "bernoulli", "poisson")
OBJECTS = {
    "gaussian": lambda: tg.likelihoods.Gaussian(noise=0.05),
    "categorical": lambda: tg.likelihoods.Categorical(),
    "bernoulli": lambda: tg.likelihoods.Bernoulli(),
    "poisson": lambda: tg.likelihoods.Poisson(),
}
NOISE = {"gaussian": 0.05}
SOME = (
    "mlp",
    "cnn",
    "residual",
    "transformer",
    "GRU batch first",
    "tied layers",
    "embedding with padding",
    "unused parameter",
)


def expected_fisher(found, likelihood, noise=1.0, dtype=torch.float64, n=5):
    model, X = found.build(dtype, n)
    H = brute.hessians(likelihood, brute.outputs(model, X, found.outputs), noise)
    return brute.fisher(found.jacobian(dtype, n), H)


def vectors(p, dtype=torch.float64):
    generator = torch.Generator().manual_seed(p)
    return torch.randn(p, 3, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("found", CASES, ids=by_name)
def test_exact_products(found, likelihood):
    expected = expected_fisher(found, likelihood)
    model, X = found.build()
    lin = tg.linearize(model, found.params, outputs=found.outputs)
    F = lin.fisher(X, likelihood, method="exact")
    V = vectors(len(expected))
    assert tuple(F.shape) == tuple(expected.shape)
    assert error(F @ V[:, 0], expected @ V[:, 0]) < 1e-9
    assert error(F @ V, expected @ V) < 1e-9


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", ["factored", "implicit", "dense"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", SOME)
def test_exact_products_in_every_way_with_likelihood_objects(name, likelihood, way):
    expected = expected_fisher(case(name), likelihood, NOISE.get(likelihood, 1.0))
    model, X = case(name).build()
    F = tg.linearize(model, way=way).fisher(X, OBJECTS[likelihood]())
    V = vectors(len(expected))
    assert error(F @ V[:, 0], expected @ V[:, 0]) < 1e-9
    assert error(F @ V, expected @ V) < 1e-9


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-5), (torch.float32, 1e-2)])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", SOME)
def test_finite_differences(name, likelihood, dtype, tolerance):
    noise = NOISE.get(likelihood, 1.0)
    expected = expected_fisher(case(name), likelihood, noise, dtype)
    model, X = case(name).build(dtype)
    F = tg.linearize(model).fisher(X, OBJECTS[likelihood](), method="finite-difference")
    V = vectors(len(expected), dtype)
    assert error(F @ V[:, 0], expected @ V[:, 0].double()) < tolerance
    assert error(F @ V, expected @ V.double()) < tolerance


def test_finite_differences_of_long_and_short_vectors():
    """The step is taken along a unit vector, and the product scaled back."""
    expected = expected_fisher(case("mlp"), "categorical")
    model, X = case("mlp").build()
    F = tg.linearize(model).fisher(X, "categorical", method="finite-difference")
    v = vectors(len(expected))[:, 0]
    for length in (1e-8, 1.0, 1e8):
        assert error(F @ (length * v), expected @ (length * v)) < 1e-5
    assert torch.equal(F @ torch.zeros_like(v), torch.zeros_like(v))


def test_finite_differences_with_a_step_of_ones_own():
    expected = expected_fisher(case("mlp"), "categorical")
    model, X = case("mlp").build()
    v = vectors(len(expected))[:, 0]
    errors = [
        error(
            tg.linearize(model).fisher(X, "categorical", method="finite-difference", epsilon=epsilon) @ v,
            expected @ v,
        )
        for epsilon in (1e-1, 1e-5)
    ]
    assert errors[1] < 1e-5 < errors[0]


class Squared:
    """A likelihood that gives its Hessian and nothing else, a full matrix for each input."""

    def hessian(self, f):
        return torch.diag_embed(1 + f.square()) + f[:, :, None] * f[:, None, :]


@pytest.mark.parametrize("way", ["factored", "implicit", "dense"])
def test_a_likelihood_that_only_gives_its_hessian(way):
    model, X = case("mlp").build()
    H = Squared().hessian(model(X).detach())
    expected = brute.fisher(case("mlp").jacobian(), H)
    F = tg.linearize(model, way=way).fisher(X, Squared())
    V = vectors(len(expected))
    assert error(F @ V, expected @ V) < 1e-9


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_likelihoods_give_the_hessian_of_their_density(likelihood):
    f = torch.randn(6, 3, dtype=torch.float64)
    expected = brute.hessians(likelihood, f, NOISE.get(likelihood, 1.0))
    assert error(OBJECTS[likelihood]().hessian(f), expected) < 1e-12


@pytest.mark.parametrize("name", ["mlp", "residual", "transformer"])
def test_kernel_and_gaussian_fisher_have_one_spectrum(name):
    model, X = case(name).build()
    lin = tg.linearize(model)
    p = lin.num_params
    F = lin.fisher(X, tg.likelihoods.Gaussian(noise=0.1)) @ torch.eye(p, dtype=torch.float64)
    K = lin.kernel(X).to_dense()
    size = min(p, len(K))
    spectra = [torch.linalg.eigvalsh(0.5 * (M + M.T))[-size:] for M in (F, K / 0.1)]
    assert error(spectra[0], spectra[1]) < 1e-9


def test_fisher_sums_over_inputs():
    """Twice the inputs, twice the matrix: no mean is taken."""
    model, X = case("mlp").build()
    lin = tg.linearize(model)
    v = vectors(lin.num_params)[:, 0]
    once = lin.fisher(X, "categorical") @ v
    assert error(lin.fisher(torch.cat([X, X]), "categorical") @ v, 2 * once) < 1e-12


def test_products_repeat_to_the_bit():
    model, X = case("cnn").build()
    F = tg.linearize(model).fisher(X, "poisson")
    v = vectors(case("cnn").jacobian().shape[1])[:, 0]
    assert torch.equal(F @ v, F @ v)


def test_an_unknown_likelihood_or_method_is_an_error():
    model, X = case("mlp").build()
    lin = tg.linearize(model)
    with pytest.raises(ValueError, match="categorical"):
        lin.fisher(X, "categorial")
    with pytest.raises(ValueError, match="finite-difference"):
        lin.fisher(X, "gaussian", method="finite-differences")
    with pytest.raises((TypeError, ValueError), match="hessian"):
        lin.fisher(X, object())
