"""The one table of networks that every operator runs through.

A case builds a network and its inputs, always the same ones for a dtype, with every parameter and
every running statistic moved away from its trivial initial value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

import brute
from networks import folds, hidden, images, plain, sequences

N = 5  # inputs of a case; some networks have as many steps, so that sizes tell nothing


def numbers(*shape):
    """Random inputs, `shape` each."""
    return lambda n: torch.randn(n, *shape)


def tokens(length, vocabulary=7):
    """Random tokens; the last of each odd input is token 0, which some cases use as padding."""

    def make(n):
        words = torch.randint(1, vocabulary, (n, length))
        words[1::2, -1] = 0
        return words

    return make


def named(**makers):
    """A dict of inputs, passed by keyword."""
    return lambda n: {name: make(n) for name, make in makers.items()}


def padding(length):
    """A mask that marks the last token of every odd input as padding."""

    def make(n):
        mask = torch.zeros(n, length, dtype=torch.bool)
        mask[1::2, -1] = True
        return mask

    return make


@dataclass(frozen=True)
class Case:
    name: str
    network: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    params: Any = None  # as for `linearize`
    names: Callable[[str], bool] | None = None  # the same choice, for brute force
    outputs: Any = None  # as for `linearize`: a callable

    def build(self, dtype=torch.float64, n=N, seed=0):
        """The network in eval mode and `n` inputs, the same in every call."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = shaken(self.network().double()).to(dtype).eval()
            torch.manual_seed(seed + 1)
            return model, cast(self.inputs(n), dtype)

    def jacobian(self, dtype=torch.float64, n=N, seed=0):
        """The brute-force Jacobian, computed in that dtype, handed over in float64."""
        return _jacobian(self, dtype, n, seed)


@cache
def _jacobian(case, dtype, n, seed):
    model, X = case.build(dtype, n, seed)
    names = None
    if case.names:
        names = [name for name, _ in model.named_parameters() if case.names(name)]
    return brute.jacobian(model, X, names, case.outputs).double()


def shaken(model):
    """The model with noise on every parameter and running statistic."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for module in model.modules():
            if getattr(module, "running_var", None) is not None:
                module.running_mean.copy_(0.3 * torch.randn_like(module.running_mean))
                module.running_var.copy_(0.5 + torch.rand_like(module.running_var))
    return model


def cast(X, dtype):
    """The floating-point tensors of a pytree in another dtype."""
    return torch.utils._pytree.tree_map(lambda t: t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t, X)


def convolution(name, dimensions, size, **options):
    inputs = numbers(2, *[size] * dimensions)
    return Case(name, lambda: images.convolution(dimensions, **options), inputs)


def transposed(name, dimensions, size, **options):
    inputs = numbers(2, *[size] * dimensions)
    return Case(name, lambda: images.transposed(dimensions, **options), inputs)


def normed(name, norm, dimensions=2):
    size = {1: 5, 2: 4}[dimensions]
    inputs = numbers(2, *[size] * dimensions)
    return Case(name, lambda: images.normed(norm(), dimensions), inputs)


def words(name, network, length=4):
    return Case(name, network, tokens(length))


PLAIN = [
    Case("mlp", plain.mlp, numbers(4)),
    Case("one number", plain.OneNumber, numbers(4)),
    Case("grid of outputs", plain.Grid, numbers(4)),
    Case("flattened", images.flattened, numbers(2, 3, 3)),
    Case("dict of inputs", plain.TwoInputs, named(left=numbers(4), right=numbers(4))),
    Case("nested inputs", plain.NestedInputs, named(pair=lambda n: (torch.randn(n, 4), {"right": torch.randn(n, 4)}))),
    Case("dict of outputs", plain.DictOutput, numbers(4), outputs=lambda f: f["answer"]),
    Case("dataclass of outputs", plain.DataclassOutput, numbers(4), outputs=lambda f: f.logits),
    Case("some outputs", plain.mlp, numbers(4), outputs=lambda f: f[:, 1:]),
    Case("three times", plain.ThreeTimes, numbers(4)),
    Case("tied layers", plain.TiedLayers, numbers(4)),
    Case("tied autoencoder", plain.TiedAutoencoder, numbers(4)),
    Case("matmul", plain.Matmul, numbers(4)),
    Case("matmul transposed", plain.MatmulTransposed, numbers(4)),
    Case("matmul from the left", plain.MatmulFromTheLeft, numbers(4)),
    Case("addmm", plain.Addmm, numbers(4)),
    Case("einsum", plain.Einsum, numbers(4)),
    Case("borrowed weight", plain.Borrowed, numbers(4)),
    Case("sliced weight", plain.Sliced, numbers(4)),
    Case("masked weight", plain.Masked, numbers(4)),
    Case("layer scale and temperature", plain.Scaled, numbers(4)),
    Case("layer scale of tokens", plain.Scaled, numbers(2, 4)),
    Case("subtracted and divided", plain.Subtracted, numbers(4)),
    Case("unused parameter", plain.Unused, numbers(4)),
    Case("half unused", plain.HalfUnused, numbers(4)),
    Case("bilinear", plain.Bilinear, numbers(4)),
    Case("prelu", plain.PRelu, numbers(4)),
    Case("weight norm", plain.weight_norm, numbers(4)),
    Case("spectral norm", plain.spectral_norm, numbers(4)),
    Case("half frozen", plain.half_frozen, numbers(4)),
    Case("adapter", plain.LowRank, numbers(4), "*lora_*", lambda name: "lora_" in name),
]

IMAGES = [
    Case("cnn", images.cnn, numbers(2, 6, 6)),
    Case("residual", images.residual, numbers(2, 4, 4)),
    Case("residual in place", lambda: images.residual(inplace=True), numbers(2, 4, 4)),
    Case("separable", images.separable, numbers(2, 5, 5)),
    Case("shared convolution", images.SharedConvolution, numbers(2, 4, 4)),
    Case("convnext", images.ConvNextLike, numbers(2, 6, 6)),
    Case("unet", images.UNet, numbers(2, 4, 4)),
    convolution("conv1d", 1, 6, kernel_size=3),
    convolution("conv1d strided", 1, 7, kernel_size=3, stride=2, padding=1),
    convolution("conv1d dilated", 1, 7, kernel_size=2, dilation=3),
    convolution("conv1d causal", 1, 5, kernel_size=3, padding=2, bias=False),
    convolution("conv1d same", 1, 6, kernel_size=4, padding="same"),
    convolution("conv1d same reflect", 1, 6, kernel_size=3, padding="same", padding_mode="reflect"),
    convolution("conv2d", 2, 4, kernel_size=3, padding=1),
    convolution("conv2d rectangle", 2, 5, kernel_size=(3, 2), stride=(2, 1), padding=(0, 1)),
    convolution("conv2d grouped", 2, 4, kernel_size=3, groups=2),
    convolution("conv2d depthwise", 2, 4, kernel_size=3, groups=4, stride=2, padding=1),
    convolution("conv2d dilated", 2, 5, kernel_size=2, dilation=(2, 3)),
    convolution("conv2d reflect", 2, 4, kernel_size=3, padding=1, padding_mode="reflect"),
    convolution("conv2d replicate", 2, 4, kernel_size=3, padding=2, padding_mode="replicate"),
    convolution("conv2d circular", 2, 4, kernel_size=3, padding=(1, 2), padding_mode="circular"),
    convolution("conv2d same", 2, 4, kernel_size=(2, 3), padding="same"),
    convolution("conv2d valid", 2, 4, kernel_size=2, padding="valid"),
    convolution("conv3d", 3, 3, kernel_size=2, padding=1, stride=2),
    convolution("conv3d grouped", 3, 3, kernel_size=2, groups=2, padding_mode="circular"),
    transposed("transposed conv1d", 1, 4, kernel_size=3, stride=2, output_padding=1),
    transposed("transposed conv1d grouped", 1, 4, kernel_size=3, stride=2, padding=1, groups=2),
    transposed("transposed conv2d", 2, 3, kernel_size=2, stride=2),
    transposed(
        "transposed conv2d grouped", 2, 3, kernel_size=3, stride=2, padding=1, output_padding=1, groups=2, bias=False
    ),
    transposed("transposed conv2d dilated", 2, 3, kernel_size=2, dilation=2),
    transposed("transposed conv3d", 3, 2, kernel_size=2, stride=2, groups=4),
    normed("batch norm 1d", lambda: nn.BatchNorm1d(4), 1),
    normed("batch norm 2d", lambda: nn.BatchNorm2d(4)),
    normed("group norm", lambda: nn.GroupNorm(2, 4)),
    normed("instance norm", lambda: nn.InstanceNorm2d(4, affine=True)),
    normed("instance norm tracked", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    normed("layer norm of images", lambda: nn.LayerNorm([4, 3, 3])),
    normed("layer norm, no shift", lambda: nn.LayerNorm([3, 3], bias=False)),
    normed("rms norm", lambda: nn.RMSNorm(4), 1),
]

SEQUENCES = [
    *[
        Case(f"{kind.__name__} {layout}", lambda k=kind, b=batch_first: sequences.Recurrent(k, b), numbers(N, 3))
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
        for batch_first, layout in ((True, "batch first"), (False, "sequence first"))
    ],
    Case(
        "GRU deep, both directions",
        lambda: sequences.Recurrent(nn.GRU, num_layers=2, bidirectional=True),
        numbers(3, 3),
    ),
    Case("LSTM projected", lambda: sequences.Recurrent(nn.LSTM, proj_size=2), numbers(3, 3)),
    Case("GRU packed", sequences.Packed, named(x=numbers(4, 3), lengths=lambda n: 1 + torch.arange(n) * 2 % 4)),
    *[
        Case(f"{kind.__name__} unrolled", lambda k=kind: sequences.Unrolled(k), numbers(4, 3))
        for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    ],
    Case("transformer", lambda: sequences.Transformer(True), numbers(4, 3)),
    Case("transformer, norm first", lambda: sequences.Transformer(True, True), numbers(4, 3)),
    Case("transformer, sequence first", lambda: sequences.Transformer(False), numbers(N, 3)),
    Case("transformer, padded", lambda: sequences.Transformer(True), named(x=numbers(4, 3), padding=padding(4))),
    Case("attention", sequences.Attention, numbers(4, 4)),
    Case("attention, sequence first", lambda: sequences.Attention(False), numbers(N, 4)),
    Case("attention, extra bias", lambda: sequences.Attention(add_bias_kv=True, bias=False), numbers(3, 4)),
    Case("attention, padded", sequences.Attention, named(x=numbers(4, 4), padding=padding(4))),
    Case(
        "attention, padded, sequence first",
        lambda: sequences.Attention(False),
        named(x=numbers(4, 4), padding=padding(4)),
    ),
    Case("cross-attention", lambda: sequences.Attention(width=3), named(x=numbers(2, 4), other=numbers(4, 3))),
    Case("cross-attention, same width", sequences.Attention, named(x=numbers(2, 4), other=numbers(4, 4))),
    Case(
        "cross-attention, sequence first",
        lambda: sequences.Attention(False, width=3),
        named(x=numbers(2, 4), other=numbers(N, 3), padding=padding(N)),
    ),
    Case("fused attention", sequences.FusedAttention, numbers(3, 4)),
    words("embedding", sequences.Words),
    words("embedding with padding", lambda: sequences.Words(padding_idx=0)),
    words("embedding with sparse gradients", lambda: sequences.Words(sparse=True)),
    words("tied embedding", lambda: sequences.Words(tied=True)),
    words("tied embedding with padding", lambda: sequences.Words(padding_idx=0, tied=True)),
    words("bag of words", sequences.BagOfWords),
    words("bag of words, mean", lambda: sequences.BagOfWords("mean")),
    words("positions", sequences.Positions),
    words("as many positions as inputs", lambda: sequences.Positions(N), N),
    Case("relative positions", sequences.RelativePositions, numbers(4, 4)),
]

HIDING = [
    Case("as many steps as inputs", folds.SequenceFirst, numbers(N, 3)),
    Case("time-major fold", folds.TimeMajor, numbers(4, 3)),
    Case("time-major fold, square", folds.TimeMajor, numbers(N, 3)),
    Case("windows in the batch", lambda: folds.Windows(False), numbers(2, 4, 4)),
    Case("windows before the batch", lambda: folds.Windows(True), numbers(2, 4, 4)),
    Case("permuted rows", lambda: folds.Permuted(False), numbers(4)),
    Case("sorted rows", lambda: folds.Permuted(True), numbers(4)),
    Case("ranked rows", folds.Ranked, numbers(4)),
    Case("doubled batch", folds.DoubledBatch, numbers(4)),
    Case("experts", folds.Experts, numbers(3, 3)),
    Case("ragged", folds.Ragged, named(x=numbers(4, 3), padding=padding(4))),
    Case("early exit", folds.EarlyExit, numbers(4)),
    Case("batch in the channels", folds.BatchInChannels, numbers(2, 4)),
    Case("forces of an energy", hidden.Forces, numbers(4)),
    Case("two kinds of use", hidden.TwoKindsOfUse, numbers(4)),
    Case("straight through", hidden.StraightThrough, numbers(4)),
    Case("mapped over rows", hidden.MappedOverRows, numbers(4)),
    Case("hypernetwork, shared", folds.SharedHyper, numbers(4)),
    Case("hypernetwork, of each input", folds.OwnHyper, numbers(4)),
    Case("custom functions", hidden.CustomFunctions, numbers(4)),
    Case("gated", hidden.Gated, numbers(4)),
    Case("checkpoint", lambda: hidden.Checkpointed(False), numbers(4)),
    Case("re-entrant checkpoint", lambda: hidden.Checkpointed(True), numbers(4)),
    Case("output in place", hidden.InPlaceOnOutput, numbers(4)),
    Case("input in place", hidden.InPlaceOnInput, numbers(4)),
    Case("written into a buffer", hidden.WrittenIntoBuffer, numbers(4)),
]

EXPRESSIONS = [
    Case(f"formula: {name}", lambda f=formula: plain.Expression(f), numbers(4))
    for name, formula in plain.EXPRESSIONS.items()
]

CASES = [*PLAIN, *EXPRESSIONS, *IMAGES, *SEQUENCES, *HIDING]


def case(name):
    """The case of that name."""
    return next(case for case in CASES if case.name == name)


def by_name(found):
    """Test identifiers from cases."""
    return found.name.replace(" ", "-") if isinstance(found, Case) else None
