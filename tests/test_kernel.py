"""`K = J S J^T`: products, blocks, diagonals and spectra, between inputs and between networks."""

import pytest
import torch

import brute
import tangents as tg
from brute import error
from cases import CASES, by_name, case, shaken
from prior_matrices import PRIORS

WAYS = ("factored", "implicit", "dense")
SOME = ("mlp", "one number", "residual", "embedding with padding", "transformer", "tied layers")


def kernel_products_agree(K, expected, tolerance=1e-10):
    """One right-hand side, more of them than there are rows, and the dense matrix."""
    generator = torch.Generator().manual_seed(1)
    columns = expected.shape[1]
    U = torch.randn(columns, 2 * columns + 3, generator=generator, dtype=torch.float64)
    assert tuple(K.shape) == tuple(expected.shape)
    assert error(K @ U[:, 0], expected @ U[:, 0]) < tolerance
    assert error(K @ U, expected @ U) < tolerance
    assert error(K.to_dense(), expected) < tolerance


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("found", CASES, ids=by_name)
def test_one_input_then_five_then_nine_with_one_linearization(found):
    model, _ = found.build()
    lin = tg.linearize(model, found.params, outputs=found.outputs, way="factored")
    for n in (1, 5, 9):
        _, X = found.build(n=n)
        K = lin.kernel(X)
        expected = brute.kernel(found.jacobian(n=n))
        kernel_products_agree(K, expected)
        assert error(K.diagonal(), expected.diagonal()) < 1e-10


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("found", CASES, ids=by_name)
def test_priors_in_the_factored_way(found, prior):
    prior_agrees(found, prior, "factored")


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("way", ["implicit", "dense", "auto"])
@pytest.mark.parametrize("name", SOME)
def test_priors_in_the_other_ways(name, way, prior):
    prior_agrees(case(name), prior, way)


def prior_agrees(found, prior, way):
    model, X = found.build()
    names = None
    if found.names:
        names = [name for name, _ in model.named_parameters() if found.names(name)]
    parameters = brute.chosen(model, names)
    S, matrix = PRIORS[prior](parameters, torch.Generator().manual_seed(2))
    lin = tg.linearize(model, found.params, outputs=found.outputs, way=way)
    expected = brute.kernel(found.jacobian(), matrix)
    K = lin.kernel(X, prior=S)
    kernel_products_agree(K, expected)
    assert error(K.diagonal(), expected.diagonal()) < 1e-10


def test_a_number_is_a_scalar_prior():
    model, X = case("mlp").build()
    K = tg.linearize(model).kernel(X, prior=0.25)
    assert error(K.to_dense(), 0.25 * brute.kernel(case("mlp").jacobian())) < 1e-10


@pytest.mark.parametrize("prior", [None, *PRIORS])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOME)
def test_between_inputs_of_different_numbers(name, way, prior):
    found = case(name)
    model, X = found.build()
    _, X2 = found.build(n=3, seed=0)
    J, J2 = found.jacobian(), found.jacobian(n=3)
    S = matrix = None
    if prior:
        S, matrix = PRIORS[prior](brute.chosen(model), torch.Generator().manual_seed(2))
    lin = tg.linearize(model, way=way)
    kernel_products_agree(lin.kernel(X, X2, prior=S), brute.kernel(J, matrix, J2))
    kernel_products_agree(lin.kernel(X2, X, prior=S), brute.kernel(J2, matrix, J))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOME)
def test_between_two_networks_of_one_architecture(name, way):
    found = case(name)
    model_a, X = found.build()
    model_b, X2 = found.build(n=3, seed=7)
    lin_a, lin_b = tg.linearize(model_a, way=way), tg.linearize(model_b, way=way)
    J_a, J_b = brute.jacobian(model_a, X), brute.jacobian(model_b, X2)
    kernel_products_agree(lin_a.kernel(X, X2, other=lin_b), brute.kernel(J_a, None, J_b))
    same_inputs = brute.kernel(J_a, None, brute.jacobian(model_b, X))
    kernel_products_agree(lin_a.kernel(X, X, other=lin_b), same_inputs)
    matrix = lin_a.kernel(X, X2, other=lin_b, prior=tg.priors.Scalar(3.0)).to_dense()
    assert error(matrix, 3 * brute.kernel(J_a, None, J_b)) < 1e-10


def test_the_same_inputs_twice_have_a_diagonal_too():
    model, X = case("mlp").build()
    K = tg.linearize(model).kernel(X, X.clone())
    assert error(K.diagonal(), brute.kernel(case("mlp").jacobian()).diagonal()) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_largest_eigenvalues_and_their_vectors(way):
    model, X = case("cnn").build()
    expected = brute.kernel(case("cnn").jacobian())
    values, vectors = tg.linearize(model, way=way).kernel(X).eigh(4)
    assert error(values.sort().values, torch.linalg.eigvalsh(expected)[-4:]) < 1e-8
    assert vectors.shape == (15, 4)
    assert error(vectors.T @ vectors, torch.eye(4, dtype=torch.float64)) < 1e-8
    assert error(expected @ vectors, vectors * values) < 1e-8


def test_dense_kernel_in_the_dtype_asked_for():
    model, X = case("mlp").build(torch.float32)
    K = tg.linearize(model).kernel(X)
    assert K.to_dense(dtype=torch.float64).dtype == torch.float64
    assert K.to_dense(dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
def test_dense_kernel_is_symmetric_to_the_bit(way):
    model, X = case("residual").build()
    dense = tg.linearize(model, way=way, batch_size=2).kernel(X).to_dense()
    assert torch.equal(dense, dense.T)


def test_many_positions_and_few_both_ways_of_a_block():
    """A layer with few parameters at many positions, and one with many at one position."""
    torch.manual_seed(3)
    model = shaken(
        torch.nn.Sequential(
            torch.nn.Conv1d(1, 2, 2),
            torch.nn.Tanh(),
            torch.nn.Flatten(),
            torch.nn.Linear(38, 60),
            torch.nn.Tanh(),
            torch.nn.Linear(60, 2),
        ).double()
    )
    X = torch.randn(6, 1, 20, dtype=torch.float64)
    expected = brute.kernel(brute.jacobian(model, X))
    kernel_products_agree(tg.linearize(model, way="factored").kernel(X), expected)


@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_a_memory_limit_changes_no_number(limit):
    """Little memory means factors recomputed for each product, in smaller batches."""
    model, X = case("cnn").build(n=12)
    expected = brute.kernel(case("cnn").jacobian(n=12))
    lin = tg.linearize(model, way="factored", memory_limit=limit)
    K = lin.kernel(X)
    kernel_products_agree(K, expected)
    assert error(K.diagonal(), expected.diagonal()) < 1e-10
