"""Networks of every precision, on the CPU and on a GPU, with products summed in float64."""

import pytest
import torch

import brute
import tangents as tg
from brute import error
from cases import case

WAYS = ("factored", "implicit", "dense", "auto")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SOME = (
    "mlp",
    "cnn",
    "residual",
    "transformer",
    "embedding with padding",
    "LSTM batch first",
    "cross-attention",
    "transposed conv2d",
)


def build(name, dtype, device, n=5):
    """Network and inputs on the device, and the brute-force Jacobian of the rounded parameters."""
    model, X = case(name).build(dtype, n)
    exact, _ = case(name).build(torch.float64, n)
    exact.load_state_dict({k: v.to(exact.state_dict()[k].dtype) for k, v in model.state_dict().items()})
    X64 = {k: widened(v) for k, v in X.items()} if isinstance(X, dict) else widened(X)
    J = brute.jacobian(exact, X64)
    moved = {k: v.to(device) for k, v in X.items()} if isinstance(X, dict) else X.to(device)
    return model.to(device), moved, J


def widened(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def products(lin, X, J, v, u):
    """Each product with its brute-force value."""
    K = J @ J.T
    return {
        "J @ v": (lin.jacobian(X) @ v, J @ v.double().cpu()),
        "J.T @ u": (lin.jacobian(X).T @ u, J.T @ u.double().cpu()),
        "row norms": (lin.jacobian(X).row_norms_squared(), K.diagonal()),
        "K @ u": (lin.kernel(X) @ u, K @ u.double().cpu()),
        "K": (lin.kernel(X).to_dense(), K),
        "diagonal": (lin.kernel(X).diagonal(), K.diagonal()),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
def test_networks_of_each_precision(dtype, tolerance, device, name, way):
    model, X, J = build(name, dtype, device)
    rows, columns = J.shape
    for precision in {dtype, torch.float64}:
        v = torch.randn(columns, 2).to(dtype).to(precision).to(device)
        u = torch.randn(rows, 2).to(dtype).to(precision).to(device)
        lin = tg.linearize(model, way=way)
        for product, (found, expected) in products(lin, X, J, v, u).items():
            assert found.device.type == device
            assert error(found.cpu(), expected) < tolerance, (product, precision)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_networks_parameters_stay_as_they_are(dtype, device):
    model, X, _ = build("mlp", dtype, device)
    lin = tg.linearize(model)
    lin.kernel(X).to_dense()
    assert all(p.dtype == dtype and p.device.type == device for p in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_taken_in_float64(device):
    """Many large terms that cancel: summed in float32, seven digits of the result are lost."""
    n = 400
    model = torch.nn.Linear(1, 1, bias=False).to(device)
    X = torch.randn(n, 1, generator=torch.Generator().manual_seed(0)).to(device)
    signs = torch.ones(n, dtype=torch.float64, device=device)
    signs[1::2] = -X[::2, 0].double() / X[1::2, 0].double()  # X.T @ signs is 0
    signs[0] += 1e-6
    lin = tg.linearize(model, way="factored")
    expected = X[0].double() * 1e-6
    assert error(lin.jacobian(X).T @ signs, expected) < 1e-4
    assert error(lin.kernel(X) @ signs, X[:, 0].double() * expected) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_dense_and_product_of_one_float32_network_agree_to_float64(device):
    """Both are sums in float64 over the same float32 factors."""
    model, X, _ = build("mlp", torch.float32, device)
    K = tg.linearize(model, way="factored").kernel(X)
    dense = K.to_dense(dtype=torch.float64)
    u = torch.randn(15, 4, dtype=torch.float64, device=device)
    assert error(K @ u, dense @ u) < 1e-12
    assert error(K.diagonal(), dense.diagonal()) < 1e-12


def test_a_network_with_parameters_of_two_precisions():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 6)
            self.last = torch.nn.Linear(6, 2, dtype=torch.float64)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)).double())

    model, X = Mixed(), torch.randn(5, 4)
    exact = Mixed().double()
    exact.load_state_dict(model.state_dict())
    expected = brute.jacobian(exact, X.double())
    v = torch.randn(expected.shape[1], dtype=torch.float64)
    for way in WAYS:
        J = tg.linearize(model, way=way).jacobian(X)
        assert error(J @ v, expected @ v) < 1e-5
        assert error(J.to_dense(), expected) < 1e-5


@pytest.mark.gpu
def test_inputs_on_another_device_are_an_error_that_names_both():
    model, X = case("mlp").build()
    with pytest.raises(ValueError, match=r"(?s)cuda.*cpu|cpu.*cuda"):
        tg.linearize(model.cuda()).jacobian(X)
