"""Every network of the table, in every way, against the brute-force Jacobian."""

import pytest
import torch

import tangents as tg
from brute import error, jacobian
from cases import CASES, by_name, case, cast
from networks import folds

WAYS = ("factored", "implicit", "dense", "auto")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def right_hand_sides(rows, columns):
    """A vector and a block for each side, always the same for a size."""
    generator = torch.Generator().manual_seed(rows + columns)
    shapes = (columns,), (columns, 3), (rows,), (rows, 3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def linearized(found, dtype, way):
    model, X = found.build(dtype)
    return tg.linearize(model, found.params, outputs=found.outputs, way=way), X


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("found", CASES, ids=by_name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_products_agree_with_brute_force(found, way, dtype):
    expected = found.jacobian(dtype)
    v, V, u, U = right_hand_sides(*expected.shape)
    lin, X = linearized(found, dtype, way)
    J = lin.jacobian(X)

    assert tuple(J.shape) == tuple(expected.shape)
    errors = {
        "J @ v": error(J @ v.to(dtype), expected @ v),
        "J @ V": error(J @ V.to(dtype), expected @ V),
        "J.T @ u": error(J.T @ u.to(dtype), expected.T @ u),
        "J.T @ U": error(J.T @ U.to(dtype), expected.T @ U),
        "to_dense": error(J.to_dense(), expected),
        "row_norms_squared": error(J.row_norms_squared(), expected.square().sum(1)),
    }
    assert {name: e for name, e in errors.items() if not e < TOLERANCE[dtype]} == {}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_the_network(way):
    for name in ("mlp", "one number", "grid of outputs", "dict of outputs", "residual"):
        lin, X = linearized(case(name), torch.float64, way)
        model, _ = case(name).build()
        f = model(X)
        f = f["answer"] if isinstance(f, dict) else f
        torch.testing.assert_close(lin(X), f.reshape(len(X), -1), rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_chosen_by_number_and_by_slice(way):
    model, X = case("mlp").build()
    rows = case("mlp").jacobian().reshape(5, 3, -1)
    second = tg.linearize(model, outputs=1, way=way)
    assert error(second.jacobian(X).to_dense(), rows[:, 1]) < 1e-10
    assert second(X).shape == (5, 1)
    others = tg.linearize(model, outputs=slice(1, None), way=way)
    assert error(others.jacobian(X).to_dense(), rows[:, 1:].flatten(0, 1)) < 1e-10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_batches_of_any_size_give_the_same_rows(way, batch_size):
    for name in ("residual", "embedding with padding", "as many steps as inputs", "experts"):
        model, X = case(name).build()
        expected = case(name).jacobian()
        J = tg.linearize(model, batch_size=batch_size, way=way).jacobian(X)
        v, _, u, _ = right_hand_sides(*expected.shape)
        assert error(J @ v, expected @ v) < 1e-10, name
        assert error(J.T @ u, expected.T @ u) < 1e-10, name
        assert error(J.row_norms_squared(), expected.square().sum(1)) < 1e-10, name


def test_one_linearization_serves_inputs_of_changing_shapes():
    """Longer sequences, more of them, and then the first shape again."""
    model, _ = case("transformer").build()
    lin = tg.linearize(model, way="factored")
    for n, length in ((5, 4), (4, 4), (1, 6), (6, 1), (5, 4)):
        X = torch.randn(n, length, 3, dtype=torch.float64)
        expected = jacobian(model, X)
        assert error(lin.jacobian(X).to_dense(), expected) < 1e-10, (n, length)
        assert error(lin.kernel(X).to_dense(), expected @ expected.T) < 1e-10, (n, length)


@pytest.mark.parametrize("batch_size", ["auto", 1, 2])
@pytest.mark.parametrize("name", ["experts", "sorted rows", "early exit", "ragged", "GRU packed"])
def test_routing_is_found_anew_for_every_batch(name, batch_size):
    """One linearization, inputs of one shape, and rows that belong to other inputs each time."""
    found = case(name)
    model, _ = found.build()
    lin = tg.linearize(model, way="factored", batch_size=batch_size)
    for seed in range(6):
        torch.manual_seed(seed)
        X = cast(found.inputs(5), torch.float64)
        if name == "ragged":
            X["padding"] = torch.rand(5, 4) < 0.4
        if name == "GRU packed":
            X["lengths"] = torch.randint(1, 5, (5,))
        expected = jacobian(model, X)
        assert error(lin.jacobian(X).to_dense(), expected) < 1e-10, seed
        assert error(lin.kernel(X).to_dense(), expected @ expected.T) < 1e-10, seed


def test_an_order_that_was_found_on_one_batch_is_not_believed_on_the_next():
    """The first inputs are in order and stay where they are, the next ones do not."""
    model, X = case("ranked rows").build()
    lin = tg.linearize(model, way="factored")
    for inputs in (X[X[:, 0].argsort()], X[X[:, 0].argsort(descending=True)], X, -X):
        assert error(lin.jacobian(inputs).to_dense(), jacobian(model, inputs)) < 1e-10


def test_dead_units_in_one_batch_leave_open_whose_rows_are_whose_in_the_next():
    """Two inputs of two steps, steps first: with one live row, steps first and inputs first look the same."""
    model = folds.Rectified().double()
    lin = tg.linearize(model, way="factored")
    for inputs in ([[1.0, -1.0], [-1.0, -1.0]], [[1.0, 2.0], [3.0, 4.0]], [[-1.0, 2.0], [3.0, -4.0]]):
        X = torch.tensor(inputs, dtype=torch.float64).unsqueeze(2)
        assert error(lin.jacobian(X).to_dense(), jacobian(model, X)) < 1e-10


def test_a_use_of_a_weight_that_only_later_inputs_show():
    """In the first batch all gates are open, and what is behind them has gradient zero."""
    model, X = case("gated").build()
    lin = tg.linearize(model, way="factored")
    for inputs in (X.abs(), X, -X.abs()):
        assert error(lin.jacobian(inputs).to_dense(), jacobian(model, inputs)) < 1e-10


def test_embedding_padding_rows_have_gradient_zero_in_every_product():
    for way in WAYS:
        model, X = case("embedding with padding").build()
        lin = tg.linearize(model, way=way)
        v = lin.flatten({name: torch.zeros_like(p) for name, p in model.named_parameters()})
        v[:4] = 1.0  # the padding row
        J = lin.jacobian(X)
        assert (J @ v).abs().max() == 0
        assert (J.T @ torch.ones(15, dtype=torch.float64))[:4].abs().max() == 0


def test_the_plan_names_what_goes_the_generic_way():
    """Ordinary layers are reached by a rule; a recurrent layer is not, and the plan says why."""
    ordinary = (
        "mlp",
        "cnn",
        "residual",
        "convnext",
        "embedding",
        "addmm",
        "rms norm",
        "three times",
        "tied layers",
        "transposed conv2d",
        "batch norm 1d",
    )
    for name in ordinary:
        lin, X = linearized(case(name), torch.float64, "factored")
        assert not lin.jacobian(X).plan.generic, name
    lin, X = linearized(case("GRU batch first"), torch.float64, "factored")
    plan = lin.jacobian(X).plan
    assert {"layer.weight_ih_l0", "layer.weight_hh_l0"} <= set(plan.generic)
    assert not {"head.weight", "head.bias"} & set(plan.generic)
    assert "layer.weight_ih_l0" in plan.explain()


def test_the_plan_explains_each_way():
    for way in WAYS:
        lin, X = linearized(case("mlp"), torch.float64, way)
        text = lin.jacobian(X).plan.explain()
        assert all(other in text for other in ("factored", "implicit", "dense"))
