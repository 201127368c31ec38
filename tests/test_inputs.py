"""Inputs: tensors, pytrees, data sets and loaders, and those that are refused."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tangents as tg
from brute import error, jacobian, kernel
from cases import case

WAYS = ("factored", "implicit", "dense", "auto")


class Rows(Dataset):
    """Items cut from a pytree when they are asked for; `asked` counts them."""

    def __init__(self, X, y=None):
        self.X, self.y, self.asked = X, y, 0

    def __len__(self):
        X = self.X
        return len(next(iter(X.values())) if isinstance(X, dict) else X)

    def __getitem__(self, i):
        if i >= len(self):
            raise IndexError(i)
        self.asked += 1
        x = {k: v[i] for k, v in self.X.items()} if isinstance(self.X, dict) else self.X[i]
        return x if self.y is None else (x, self.y[i])


class Stream(IterableDataset):
    def __init__(self, X):
        self.X = X

    def __iter__(self):
        return iter(self.X)


def targets(n):
    return torch.arange(n)


SOURCES = {
    "data set": lambda X: Rows(X),
    "data set with targets": lambda X: Rows(X, targets(5)),
    "tensor data set": lambda X: TensorDataset(X),
    "tensor data set with targets": lambda X: TensorDataset(X, targets(5)),
    "loader": lambda X: DataLoader(Rows(X), batch_size=2),
    "loader with targets": lambda X: DataLoader(Rows(X, targets(5)), batch_size=3),
    "loader of a tensor data set": lambda X: DataLoader(TensorDataset(X, targets(5)), batch_size=2),
    "loader of single items": lambda X: DataLoader(Rows(X)),
    "loader of a stream": lambda X: DataLoader(Stream(X), batch_size=2),
}


def everything_agrees(lin, source, expected):
    """Products on either side, rows, and kernels, on data that comes anew for each."""
    rows, columns = expected.shape
    v, u = torch.randn(columns, 2).double(), torch.randn(rows, 2).double()
    J = lin.jacobian(source)
    assert tuple(J.shape) == (rows, columns)
    assert error(J @ v, expected @ v) < 1e-10
    assert error(J.T @ u, expected.T @ u) < 1e-10
    assert error(J.to_dense(), expected) < 1e-10
    K = lin.kernel(source)
    assert error(K @ u, kernel(expected) @ u) < 1e-10
    assert error(K.to_dense(), kernel(expected)) < 1e-10
    assert error(K.diagonal(), kernel(expected).diagonal()) < 1e-10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
def test_data_sets_and_loaders(source, way):
    model, X = case("mlp").build()
    everything_agrees(tg.linearize(model, way=way), SOURCES[source](X), case("mlp").jacobian())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", ["data set", "data set with targets", "loader", "loader with targets"])
def test_data_sets_and_loaders_of_dicts(source, way):
    for name in ("dict of inputs", "transformer, padded"):
        model, X = case(name).build()
        everything_agrees(tg.linearize(model, way=way), SOURCES[source](X), case(name).jacobian())


@pytest.mark.parametrize("way", WAYS)
def test_streamed_against_held_and_held_against_streamed(way):
    model, X = case("cnn").build()
    _, X2 = case("cnn").build(n=3)
    expected = kernel(case("cnn").jacobian(), None, case("cnn").jacobian(n=3))
    lin = tg.linearize(model, way=way)
    loader, loader2 = DataLoader(Rows(X), batch_size=2), DataLoader(Rows(X2), batch_size=2)
    for left, right in ((loader, X2), (X, loader2), (loader, loader2)):
        K = lin.kernel(left, right)
        assert error(K.to_dense(), expected) < 1e-10
        assert error(K @ torch.ones(9).double(), expected.sum(1)) < 1e-10


def test_a_fisher_of_streamed_data():
    model, X = case("mlp").build()
    lin = tg.linearize(model)
    v = torch.randn(lin.num_params, dtype=torch.float64)
    expected = lin.fisher(X, "categorical") @ v
    for source in SOURCES.values():
        assert error(lin.fisher(source(X), "categorical") @ v, expected) < 1e-10


def test_outputs_of_streamed_data():
    model, X = case("mlp").build()
    lin = tg.linearize(model)
    for source in SOURCES.values():
        assert error(lin(source(X)), model(X)) < 1e-12


def test_a_list_of_batches_is_no_tensor():
    """A pytree that is a list of tensors has one leading dimension, and is passed on as it is."""
    model, X = case("mlp").build()
    with pytest.raises((ValueError, TypeError)):
        tg.linearize(model).jacobian([X[:2], X[2:]]).to_dense()


@pytest.mark.parametrize(
    "loader",
    [
        lambda X: DataLoader(Rows(X), batch_size=2, shuffle=True),
        lambda X: DataLoader(Rows(X), sampler=torch.utils.data.RandomSampler(Rows(X))),
        lambda X: DataLoader(Rows(X), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 5, num_samples=5)),
    ],
    ids=["shuffle", "random sampler", "weighted sampler"],
)
def test_a_shuffled_loader_is_refused(loader):
    model, X = case("mlp").build()
    with pytest.raises(ValueError, match="shuffle"):
        tg.linearize(model).jacobian(loader(X))


def test_leading_dimensions_that_differ_are_named():
    model, X = case("dict of inputs").build()
    X["right"] = X["right"][:3]
    with pytest.raises(ValueError, match=r"(?s)5.*3|3.*5"):
        tg.linearize(model).jacobian(X)


def test_leading_dimensions_that_differ_in_a_nested_input():
    model, X = case("nested inputs").build()
    left, more = X["pair"]
    with pytest.raises(ValueError, match=r"(?s)4.*5|5.*4"):
        tg.linearize(model).jacobian({"pair": (left[:4], more)})


@pytest.mark.parametrize(
    "empty",
    [
        lambda X: X[:0],
        lambda X: Rows(X[:0]),
        lambda X: TensorDataset(X[:0]),
        lambda X: DataLoader(TensorDataset(X[:0])),
        lambda X: {},
    ],
    ids=["tensor", "data set", "tensor data set", "loader", "dict"],
)
def test_empty_data_is_refused(empty):
    model, X = case("mlp").build()
    with pytest.raises(ValueError, match=r"empty|no input"):
        tg.linearize(model).jacobian(empty(X)).to_dense()


def test_what_is_no_input_is_refused():
    model, _ = case("mlp").build()
    for wrong in ("text", 3.0, None):
        with pytest.raises((TypeError, ValueError), match="tensor"):
            tg.linearize(model).jacobian(wrong)
    with pytest.raises(ValueError, match=r"dimension|axis"):
        tg.linearize(model).jacobian(torch.tensor(1.0))


def test_constants_beside_the_tensors_of_a_dict():
    """What is no tensor (a flag, None) is passed on to every batch."""

    class Flagged(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, twice=False, mask=None):
            assert mask is None
            return self.inner(x) * (2 if twice else 1)

    model, X = case("mlp").build()
    lin = tg.linearize(Flagged(model), batch_size=2)
    J = lin.jacobian({"x": X, "twice": True, "mask": None})
    assert error(J.to_dense(), 2 * case("mlp").jacobian()) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_are_equal_or_share_memory(way):
    """Rows that are one input five times, every second row of a tensor, and columns."""
    for name in ("time-major fold", "as many steps as inputs", "experts", "residual"):
        model, X = case(name).build(n=10)
        columns = X.transpose(1, -1).contiguous().transpose(1, -1)
        for inputs in (X[:1].expand_as(X[:5]), X[::2], columns[:5]):
            expected = jacobian(model, inputs)
            lin = tg.linearize(model, way=way)
            assert error(lin.jacobian(inputs).to_dense(), expected) < 1e-10, name
            assert error(lin.kernel(inputs).to_dense(), kernel(expected)) < 1e-10, name
