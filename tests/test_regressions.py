"""Networks and data that once gave wrong numbers, or changed what is not ours: each with what it should give."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import brute
import tangents as tg
from brute import error


class BiasFirst(nn.Module):
    """Its bias is registered before its weight."""

    def __init__(self):
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 4))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(nn.functional.linear(x, self.weight, self.bias)))


class OverlappingTables(nn.Module):
    """Two slices of one table that share entries."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 3)

    def forward(self, index):
        low = nn.functional.embedding(index, self.table[:6])
        high = nn.functional.embedding(index, self.table[2:])
        return self.last(torch.tanh(low * high.roll(1, 1)).sum(1))


class TwoShapes(nn.Module):
    """One weight seen as (6, 4) and as (4, 6)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return torch.tanh(x @ self.weight.t()) @ self.weight.view(4, 6).t()


@pytest.mark.parametrize(
    "network, X",
    [
        (BiasFirst, torch.randn(5, 4, dtype=torch.float64)),
        (OverlappingTables, torch.randint(0, 6, (5, 3))),
        (TwoShapes, torch.randn(5, 4, dtype=torch.float64)),
    ],
    ids=["bias first", "overlapping tables", "two shapes"],
)
def test_kernels_of_unusual_parameters(network, X, monkeypatch):
    monkeypatch.setattr("tangents.jacobian.features.ROW_CHUNK", 200)
    model = network().double()
    J = brute.jacobian(model, X)
    K = tg.linearize(model, way="factored").kernel(X)
    assert error(K.to_dense(), J @ J.T) < 1e-10
    assert error(K.diagonal(), J.square().sum(1)) < 1e-10


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(5, 4, dtype=torch.float64)


def test_a_forward_replaced_on_the_instance_is_refused():
    model, X = small()
    forward = model.forward
    model.forward = lambda x: forward(x)
    with pytest.raises(ValueError, match=r"model\.forward"):
        tg.linearize(model).jacobian(X)


def test_outputs_of_a_kind_that_is_not_known_are_refused():
    model, X = small()
    for wrong in ([0], True, 1.5):
        with pytest.raises(TypeError, match="outputs="):
            tg.linearize(model, outputs=wrong)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return {"scores": self.inner(x), "other": x}

    assert error(tg.linearize(Named(), outputs="scores")(X), model(X)) < 1e-12
    with pytest.raises(ValueError, match="such a field"):
        tg.linearize(Named(), outputs="score")(X)


def test_finite_differences_notice_changed_parameters():
    model, X = small()
    F = tg.linearize(model).fisher(X, "categorical", method="finite-difference", epsilon=1e-5)
    with torch.no_grad():
        model[0].weight.mul_(3)
    with pytest.raises(ValueError, match="again"):
        F @ torch.ones(F.shape[1], dtype=torch.float64)


class Noisy(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((4,), float(i), dtype=torch.float64) + torch.randn(4, dtype=torch.float64)


def test_data_that_changes_between_passes_is_refused():
    model, _ = small()
    J = tg.linearize(model, memory_limit=1, batch_size=2).jacobian(Noisy())
    v = torch.ones(J.shape[1], dtype=torch.float64)
    with pytest.raises(ValueError, match="same on every pass"):
        _ = J @ v, J @ v


def test_a_pass_over_a_loader_leaves_the_random_state():
    model, X = small()
    before = torch.get_rng_state()
    K = tg.linearize(model).kernel(DataLoader(TensorDataset(X), batch_size=2))
    _ = K @ torch.ones(15, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cross_diagonal_of_batches_that_do_not_match():
    model, X = small()
    expected = brute.jacobian(model, X).square().sum(1)
    lin = tg.linearize(model, batch_size=2)
    K = lin.kernel(X, X.clone(), other=tg.linearize(model, batch_size=3))
    assert error(K.diagonal(), expected) < 1e-10


def test_a_kronecker_prior_that_is_not_symmetric_is_refused():
    model, X = small()
    A = torch.eye(4, dtype=torch.float64)
    A[0, 1] = 0.5
    with pytest.raises(ValueError, match="symmetric"):
        tg.linearize(model).kernel(X, prior=tg.priors.Kronecker({"0.weight": (torch.eye(6, dtype=torch.float64), A)}))


def test_two_products_of_one_operator_can_be_differentiated():
    model, X = small()
    X.requires_grad_()
    K = tg.linearize(model).kernel(X)
    u = torch.ones(15, dtype=torch.float64)
    first = torch.autograd.grad((K @ u).sum(), X)[0]
    second = torch.autograd.grad((K @ u).sum(), X)[0]
    assert error(first, second) < 1e-12


def test_a_batch_that_mixes_from_four_inputs_on_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

        def forward(self, x):
            h = self.first(x)
            return self.last(torch.tanh(h - h.mean(0) if len(x) > 3 else h))

    with pytest.raises(ValueError, match="mixes"):
        tg.linearize(Late()).jacobian(torch.randn(8, 4, dtype=torch.float64)).to_dense()


def test_a_scripted_network_with_some_parameters_chosen():
    model, X = small()
    scripted = torch.jit.script(model)
    lin = tg.linearize(scripted, params="0.*")
    columns = brute.jacobian(model, X)[:, : lin.num_params]
    assert error(lin.jacobian(X).to_dense(), columns) < 1e-10
    assert all(p.requires_grad for p in scripted.parameters())
