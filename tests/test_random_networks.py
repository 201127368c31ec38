"""Random architectures and shapes, in a random way, against brute force."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import brute
import tangents as tg
from cases import shaken
from prior_matrices import PRIORS

ACTIVATIONS = (nn.Tanh, nn.GELU, nn.Softplus, nn.Identity, lambda: nn.ReLU(inplace=True))
WAYS = st.sampled_from(["factored", "implicit", "dense", "auto"])
small = st.integers(1, 4)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Repeated(Residual):
    def forward(self, x):
        return self.inner(self.inner(x).sin())


class Transposed(Residual):
    """The layers run on sequences with the steps first."""

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def seeded(draw):
    """A drawn seed for the initial parameters and for the inputs, so that an example can be repeated."""
    torch.manual_seed(draw(st.integers(0, 10_000)))


@st.composite
def vectors(draw):
    """Linear layers, their norms, residual and repeated ones, on `(n, d)`."""
    seeded(draw)
    width = d = draw(small)
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["linear", "norm", "batch norm", "residual", "repeated"]))
        if kind == "linear":
            wider = draw(small)
            layers.append(nn.Linear(width, wider, bias=draw(st.booleans())))
            width = wider
        elif kind == "norm":
            layers.append(nn.LayerNorm(width, bias=draw(st.booleans())))
        elif kind == "batch norm":
            layers.append(nn.BatchNorm1d(width))
        else:
            wrapper = Residual if kind == "residual" else Repeated
            layers.append(wrapper(nn.Linear(width, width)))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
    return nn.Sequential(*layers, nn.Linear(width, draw(small))), (d,)


@st.composite
def images(draw):
    """Convolutions of any dimension and shape, their norms, then a linear layer."""
    seeded(draw)
    dimensions = draw(st.integers(1, 3))
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    channels = entered = draw(st.sampled_from([1, 2, 4]))
    layers = []
    for depth in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([g for g in (1, 2, 4) if channels % g == 0]))
        out = groups * draw(st.integers(1, 2))
        stride, bias = draw(st.integers(1, 2)), draw(st.booleans())
        size = draw(st.integers(1, 2 if dimensions == 3 else 3))
        if draw(st.integers(0, 3)) == 0:
            layers.append(
                transposed(
                    channels,
                    out,
                    size,
                    stride=stride,
                    groups=groups,
                    bias=bias,
                    output_padding=draw(st.integers(0, stride - 1)),
                )
            )
        else:
            mode = draw(st.sampled_from(["zeros", "replicate", "circular"]))
            layers.append(
                convolution(
                    channels,
                    out,
                    size,
                    stride=stride,
                    groups=groups,
                    bias=bias,
                    padding=size // 2,
                    padding_mode=mode,
                    dilation=draw(st.integers(1, 2)) if size <= 2 else 1,
                )
            )
        channels = out
        if depth == 0 and draw(st.booleans()):
            layers.append(nn.GroupNorm(1, channels))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
    head = nn.LazyLinear(draw(small))
    return nn.Sequential(*layers, nn.Flatten(), head), (entered, *[4] * dimensions)


@st.composite
def sequences(draw):
    """Layers on `(n, T, d)`, some with the steps first, then a linear layer on all steps."""
    seeded(draw)
    d, layers = 2 * draw(st.integers(1, 2)), []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["linear", "residual", "norm", "attention", "first"]))
        layers.append(
            {
                "linear": lambda: nn.Sequential(nn.Linear(d, d), nn.Tanh()),
                "residual": lambda: Residual(nn.Linear(d, d)),
                "norm": lambda: nn.LayerNorm(d),
                "attention": lambda: nn.TransformerEncoderLayer(d, 2, 3, batch_first=True),
                "first": lambda: Transposed(nn.TransformerEncoderLayer(d, 1, 3)),
            }[kind]()
        )
    layers += [nn.Flatten(), nn.LazyLinear(draw(small))]
    return nn.Sequential(*layers), (draw(st.integers(1, 5)), d)


def agrees(network, n, way, batch_size):
    """Products, rows and kernel against brute force."""
    model, shape = network
    X = torch.randn(n, *shape, dtype=torch.float64)
    model = model.double().eval()
    with torch.no_grad():
        model(X)  # gives lazy layers their shapes
    shaken(model)
    expected = brute.jacobian(model, X)
    v, u = torch.randn(expected.shape[1], 2).double(), torch.randn(expected.shape[0], 2).double()
    J = tg.linearize(model, way=way, batch_size=batch_size).jacobian(X)
    K = tg.linearize(model, way=way, batch_size=batch_size).kernel(X)
    scale = expected.norm()
    for found, reference in (
        (J @ v, expected @ v),
        (J.T @ u, expected.T @ u),
        (J.to_dense(), expected),
        (K.to_dense(), expected @ expected.T),
        (K @ u, expected @ (expected.T @ u)),
    ):
        assert found.shape == reference.shape
        assert (found.double() - reference).norm() <= 1e-10 * (1 + scale) ** 2


options = {
    "n": st.integers(1, 5),
    "way": WAYS,
    "batch_size": st.sampled_from(["auto", 1, 2]),
}


@settings(max_examples=40)
@given(network=vectors(), **options)
def test_on_vectors(network, n, way, batch_size):
    agrees(network, n, way, batch_size)


@settings(max_examples=40)
@given(network=images(), **options)
def test_on_images(network, n, way, batch_size):
    agrees(network, n, way, batch_size)


@settings(max_examples=40)
@given(network=sequences(), **options)
def test_on_sequences(network, n, way, batch_size):
    agrees(network, n, way, batch_size)


class Words(nn.Module):
    """Embedding, residual layers used twice and a norm, at sizes that make either formula for a block the cheaper."""

    def __init__(self, vocabulary, d, width, tied):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, d), nn.LayerNorm(width)
        self.up, self.down, self.head = nn.Linear(d, width), nn.Linear(width, d), nn.Linear(d, vocabulary)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + self.down(torch.tanh(self.norm(self.up(h))))
        return self.head((h + self.down(torch.tanh(self.up(h)))).mean(1))[:, :3]


@settings(max_examples=60)
@given(
    sizes=st.tuples(*[st.sampled_from(s) for s in ([3, 40], [1, 3, 16], [2, 24], [1, 2, 30], [1, 4, 9])]),
    tied=st.booleans(),
    prior=st.sampled_from([None, *PRIORS]),
    memory_limit=st.sampled_from([None, 10_000, 1_000_000]),
    way=WAYS,
)
def test_kernels_of_any_size_with_priors_and_little_memory(sizes, tied, prior, memory_limit, way):
    vocabulary, d, width, length, n = sizes
    torch.manual_seed(sum(sizes))
    model = shaken(Words(vocabulary, d, width, tied).double())
    X, X2 = (torch.randint(0, vocabulary, (rows, length)) for rows in (n, 5))
    J, J2 = brute.jacobian(model, X), brute.jacobian(model, X2)
    S = matrix = None
    if prior:
        S, matrix = PRIORS[prior](brute.chosen(model), torch.Generator().manual_seed(2))
    lin = tg.linearize(model, way=way, memory_limit=memory_limit)
    K, cross = lin.kernel(X, prior=S), lin.kernel(X, X2, prior=S)
    u = torch.randn(len(J2), 2, dtype=torch.float64)
    expected = brute.kernel(J, matrix)
    assert brute.error(K.to_dense(), expected) < 1e-9
    assert brute.error(K.diagonal(), expected.diagonal()) < 1e-9
    assert brute.error(cross @ u, brute.kernel(J, matrix, J2) @ u) < 1e-9
    assert brute.error(cross.to_dense(), brute.kernel(J, matrix, J2)) < 1e-9
