"""Choosing parameters, their order, and the way between one vector and named tensors."""

import pytest
import torch

import tangents as tg
from brute import error, jacobian
from cases import case, shaken
from networks import plain, sequences

MLP = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]


def names(model, params=None):
    return list(tg.linearize(model, params).param_names)


def vectors_only(name, parameter):
    return parameter.ndim == 1


def first_layer_only(name, parameter):
    return name.startswith("0")


@pytest.mark.parametrize(
    "params, expected",
    [
        (None, MLP),
        ("*", MLP),
        ("*.weight", ["0.weight", "2.weight", "4.weight"]),
        ("2.*", ["2.weight", "2.bias"]),
        ("4.bias", ["4.bias"]),
        (["4.*", "0.bias"], ["0.bias", "4.weight", "4.bias"]),
        (["*.bias", "0.*"], ["0.weight", "0.bias", "2.bias", "4.bias"]),
        ("[02].weight", ["0.weight", "2.weight"]),
        (tg.last_layers(1), ["4.weight", "4.bias"]),
        (tg.last_layers(2), ["2.weight", "2.bias", "4.weight", "4.bias"]),
        (vectors_only, ["0.bias", "2.bias", "4.bias"]),
        (first_layer_only, ["0.weight", "0.bias"]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_choice(params, expected):
    model = plain.mlp()
    assert names(model, params) == expected
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert tg.linearize(model, params).num_params == sum(sizes[name] for name in expected)


@pytest.mark.parametrize("way", ["factored", "implicit", "dense", "auto"])
@pytest.mark.parametrize("params", ["*.bias", "2.weight", tg.last_layers(1), ["0.*", "4.bias"]], ids=str)
def test_chosen_columns_are_those_of_the_whole(params, way):
    model, X = case("mlp").build()
    lin = tg.linearize(model, params, way=way)
    start, columns = 0, []
    for name, parameter in model.named_parameters():
        if name in lin.param_names:
            columns += range(start, start + parameter.numel())
        start += parameter.numel()
    assert error(lin.jacobian(X).to_dense(), case("mlp").jacobian()[:, columns]) < 1e-10


@pytest.mark.parametrize("way", ["factored", "implicit", "dense"])
def test_a_choice_in_the_middle_of_a_residual_network(way):
    model, X = case("residual in place").build()
    chosen = [name for name, _ in model.named_parameters() if name.startswith("4.conv1")]
    lin = tg.linearize(model, "4.conv1.*", way=way)
    assert error(lin.jacobian(X).to_dense(), jacobian(model, X, chosen)) < 1e-10


def test_all_means_all_that_require_grad():
    assert names(plain.half_frozen()) == MLP[2:]


def test_a_pattern_reaches_frozen_parameters_and_leaves_them_frozen():
    model, X = case("half frozen").build()
    lin = tg.linearize(model, "0.*")
    assert list(lin.param_names) == ["0.weight", "0.bias"]
    expected = jacobian(model, X, ["0.weight", "0.bias"])
    assert error(lin.jacobian(X).to_dense(), expected) < 1e-10
    assert not model[0].weight.requires_grad


def test_an_adapter_is_a_pattern():
    assert names(plain.LowRank(), "*lora_*") == ["lora_A", "lora_B"]


def test_last_layers_counts_modules_that_own_parameters():
    """Activations and containers do not count."""
    model = torch.nn.Sequential(plain.mlp(), torch.nn.ReLU(), torch.nn.Flatten())
    assert names(model, tg.last_layers(1)) == ["0.4.weight", "0.4.bias"]
    found = names(sequences.Transformer(True), tg.last_layers(2))
    assert found == ["encoder.layers.1.norm2.weight", "encoder.layers.1.norm2.bias", "head.weight", "head.bias"]


def test_last_layers_refuses_a_number_that_is_none():
    for number in (0, -1):
        with pytest.raises(ValueError, match="last_layers"):
            tg.linearize(plain.mlp(), tg.last_layers(number))


def test_tied_weights_appear_once_under_their_first_name():
    assert names(plain.TiedLayers()) == [
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
        "left.weight",
        "left.bias",
        "right.bias",
    ]
    tied = sequences.Words(tied=True)
    assert names(tied, tg.last_layers(1)) == ["embed.weight", "head.bias"]
    assert names(tied, "embed.*") == ["embed.weight"]


@pytest.mark.parametrize(
    "params, near",
    [
        ("2.wieght", "2.weight"),
        ("4.biass", "4.bias"),
        (["0.weights", "0.bia"], "0.weight"),
    ],
)
def test_a_pattern_that_matches_nothing_lists_near_names(params, near):
    with pytest.raises(ValueError, match=near):
        tg.linearize(plain.mlp(), params)


def test_one_pattern_of_several_that_matches_nothing_is_an_error_too():
    with pytest.raises(ValueError, match="wieght"):
        tg.linearize(plain.mlp(), ["0.weight", "2.wieght"])


def test_a_predicate_that_chooses_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"0\.weight"):
        tg.linearize(plain.mlp(), lambda name, parameter: False)


def test_a_wholly_frozen_network_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"requires_grad|require grad|params"):
        tg.linearize(plain.mlp().requires_grad_(False))


def test_a_choice_of_the_wrong_kind_is_an_error():
    for params in (3, [1, 2], 0.5):
        with pytest.raises(TypeError, match="pattern"):
            tg.linearize(plain.mlp(), params)


@pytest.mark.parametrize("params", [None, "*.weight", tg.last_layers(1)], ids=str)
def test_flatten_and_unflatten_are_inverse(params):
    model = shaken(plain.mlp().double())
    lin = tg.linearize(model, params)
    v = torch.randn(lin.num_params, dtype=torch.float64)
    named = lin.unflatten(v)
    parameters = dict(model.named_parameters())
    assert list(named) == list(lin.param_names)
    assert all(named[name].shape == parameters[name].shape for name in named)
    assert torch.equal(lin.flatten(named), v)
    flat = lin.flatten({name: parameters[name].detach() for name in lin.param_names})
    assert torch.equal(flat, torch.cat([parameters[n].detach().flatten() for n in named]))


def test_flatten_takes_the_names_in_any_order():
    lin = tg.linearize(plain.mlp().double())
    named = lin.unflatten(torch.randn(lin.num_params, dtype=torch.float64))
    backwards = dict(reversed(list(named.items())))
    assert torch.equal(lin.flatten(backwards), lin.flatten(named))


def test_flatten_and_unflatten_refuse_what_does_not_fit():
    lin = tg.linearize(plain.mlp())
    named = lin.unflatten(torch.randn(lin.num_params))
    with pytest.raises(ValueError, match="93"):
        lin.unflatten(torch.randn(lin.num_params + 1))
    with pytest.raises(ValueError, match=r"2\.bias"):
        lin.flatten({name: t for name, t in named.items() if name != "2.bias"})
    with pytest.raises(ValueError, match="extra"):
        lin.flatten(named | {"extra": torch.ones(2)})
    with pytest.raises(ValueError, match=r"0\.weight"):
        lin.flatten(named | {"0.weight": torch.ones(2)})
