"""Networks, parameters and inputs that are refused: the kind of error, and what it says to do."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brute
import tangents as tg
from brute import error
from cases import case
from networks import plain
from networks.plain import Body

WAYS = ("factored", "implicit", "dense", "auto")
every_way = pytest.mark.parametrize("way", WAYS)


def ones(size):
    return torch.ones(size, dtype=torch.float64)


def told(use, *words):
    """How many warnings with all these words `use` gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return sum(all(word in message for word in words) for message in messages)


class Through(Body):
    """A network with one function in the middle."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def middle(self, h):
        return self.function(h)


def through(function, n=5):
    torch.manual_seed(0)
    return Through(function).double(), torch.randn(n, 4, dtype=torch.float64)


class Cut(nn.Module):
    """The outputs themselves go through the function."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3).double(), function

    def forward(self, x):
        return self.function(self.layer(x))


def fails(model, X, way, match, kind=ValueError, **options):
    """The error comes at the latest with the first product."""

    def multiply():
        J = tg.linearize(model, way=way, **options).jacobian(X)
        return J @ ones(J.shape[1])

    with pytest.raises(kind, match=match):
        multiply()


# Training mode, and parameters that do nothing: allowed, and told.


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.Dropout(0.5)], ids=["batch norm", "drop"])
@every_way
def test_training_mode_is_told_once_and_eval_used(layer, way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 2)).double().train()
    X = torch.randn(5, 4, dtype=torch.float64)

    def use():
        lin = tg.linearize(model, way=way)
        for _ in range(2):
            assert error(lin(X), reference) < 1e-12
            lin.jacobian(X).to_dense()

    reference = model.eval()(X).detach()
    model.train()
    assert told(use, "eval") == 1
    assert model.training


@every_way
def test_training_mode_without_such_layers_is_not_worth_a_word(way):
    model, X = case("mlp").build()
    assert told(lambda: tg.linearize(model.train(), way=way).jacobian(X).to_dense()) == 0


@every_way
def test_a_parameter_without_influence_is_told_once_by_name(way):
    model, X = case("unused parameter").build()

    def use():
        lin = tg.linearize(model, way=way)
        for _ in range(2):
            J = lin.jacobian(X)
            J @ ones(J.shape[1])
            J.T @ ones(J.shape[0])

    assert told(use, "idle.weight") == 1


# Networks that have no Jacobian with a row for each input.


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(0),
        lambda h: h + h.roll(1, 0),
        lambda h: h.cumsum(0),
        lambda h: F.batch_norm(h, None, None, training=True),
        lambda h: (h @ h.t()).softmax(-1) @ h,
    ],
    ids=["centred", "rolled", "summed up", "batch statistics", "attention to other inputs"],
)
@every_way
def test_outputs_that_mix_samples(mix, way):
    fails(*through(mix), way, "(?i)mix")


@every_way
def test_batch_norm_without_running_statistics_mixes_samples(way):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 2)).double()
    fails(model, torch.randn(5, 4, dtype=torch.float64), way, "(?i)mix")


@every_way
def test_mixing_that_reaches_only_two_of_many_samples(way):
    def swap(h):
        return torch.cat([h[:1], h[2:3], h[1:2], h[3:]])

    fails(*through(swap, 8), way, "(?i)mix")


@pytest.mark.parametrize(
    "random",
    [
        lambda h: F.dropout(h, 0.5, training=True),
        lambda h: h * torch.randn_like(h),
    ],
    ids=["dropout", "noise"],
)
@every_way
def test_outputs_that_are_random_in_eval_mode(random, way):
    fails(*through(random), way, "(?i)random")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch_size", ["auto", 2])
@every_way
def test_outputs_that_are_not_finite_name_the_first_input(value, batch_size, way):
    X = torch.randn(6, 4, dtype=torch.float64)
    X[3:, 1] = value
    fails(Cut(torch.relu), X, way, r"input 3\b", batch_size=batch_size)


@every_way
def test_derivatives_that_are_not_finite_are_not_taken_for_something_else(way):
    """A square root at 0: the output is finite, its derivative is not."""
    X = torch.rand(6, 4, dtype=torch.float64)
    X[3] = 0
    model = Cut(lambda f: f.square().sum(1, keepdim=True).sqrt())
    torch.nn.init.zeros_(model.layer.bias)
    fails(model, X, way, "(?i)finite")


@pytest.mark.parametrize(
    "cut",
    [
        lambda h: h.detach(),
        lambda h: torch.from_numpy(h.detach().numpy()),
    ],
    ids=["detach", "numpy"],
)
@every_way
def test_outputs_that_are_cut_off_from_the_parameters(cut, way):
    fails(Cut(cut), torch.randn(5, 4, dtype=torch.float64), way, "(?i)differentiab")


@every_way
def test_outputs_that_are_whole_numbers(way):
    X = torch.randn(5, 4, dtype=torch.float64)
    fails(Cut(lambda f: f.argmax(-1)), X, way, "(?i)differentiab|floating", (ValueError, TypeError))


@every_way
def test_an_operation_without_a_derivative_is_named(way):
    fails(*through(lambda h: torch.igamma(h.exp(), h.exp())), way, "(?i)igamma")


class OnceOnly(torch.autograd.Function):
    """Neither a forward mode nor a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def test_an_operation_with_neither_forward_mode_nor_second_derivative_is_named():
    """`J @ v` of the implicit way needs one of them: it is right nevertheless, and says what is slow."""
    model, X = through(OnceOnly.apply)
    same, _ = through(torch.sin)
    expected = brute.jacobian(same, X)
    J = tg.linearize(model, way="implicit").jacobian(X)
    assert error(J.T @ ones(15), expected.T @ ones(15)) < 1e-10
    with pytest.warns(UserWarning, match="OnceOnly"):
        product = J @ ones(J.shape[1])
    assert error(product, expected.sum(1)) < 1e-10
    for way in ("factored", "dense"):
        J = tg.linearize(model, way=way).jacobian(X)
        assert error(J @ ones(J.shape[1]), expected.sum(1)) < 1e-10


@pytest.mark.parametrize(
    "shape",
    [
        lambda f: f.sum(),
        lambda f: f[:3],
        lambda f: f.sum(0),
        lambda f: torch.cat([f, f]),
    ],
    ids=["one number", "fewer rows", "summed over inputs", "more rows"],
)
@every_way
def test_outputs_without_a_row_for_each_input(shape, way):
    fails(Cut(shape), torch.randn(5, 4, dtype=torch.float64), way, "(?i)row|shape|leading|mix")


@every_way
def test_outputs_of_several_tensors_ask_which(way):
    model, X = case("dict of outputs").build()
    fails(model, X, way, "outputs=", (ValueError, TypeError))


# Parameters and inputs of the wrong kind.


class WithParameter(Body):
    def __init__(self, parameter):
        super().__init__()
        self.extra = parameter

    def forward(self, x):
        return super().forward(x) * self.extra.sum().real


@every_way
def test_an_integer_parameter(way):
    parameter = nn.Parameter(torch.arange(3), requires_grad=False)
    fails(
        WithParameter(parameter),
        torch.randn(5, 4),
        way,
        "(?i)extra.*(integer|int64|floating)",
        (ValueError, TypeError),
        params="extra",
    )


@every_way
def test_a_complex_parameter(way):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    fails(WithParameter(parameter), torch.randn(5, 4), way, "(?i)complex", (ValueError, TypeError))


@every_way
def test_complex_outputs(way):
    X = torch.randn(5, 4, dtype=torch.float64)
    fails(Cut(torch.fft.fft), X, way, "(?i)complex", (ValueError, TypeError))


@every_way
def test_parameters_without_values(way):
    with torch.device("meta"):
        model = plain.mlp()
    fails(model, torch.randn(5, 4), way, "(?i)meta")


@every_way
def test_inputs_without_values(way):
    fails(plain.mlp(), torch.randn(5, 4, device="meta"), way, "(?i)meta")


@pytest.mark.parametrize(
    "given, needed",
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (torch.int64, torch.float32),
    ],
    ids=str,
)
@every_way
def test_inputs_of_the_wrong_dtype_name_both(given, needed, way):
    fails(
        plain.mlp().to(needed),
        torch.ones(5, 4, dtype=given),
        way,
        f"(?s){given}.*{needed}|{needed}.*{given}",
        (ValueError, TypeError),
    )
