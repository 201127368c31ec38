"""Networks on vectors: outputs of every shape, parameters used in every way."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def mlp(i=4, h=6, o=3):
    return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, o))


class Body(nn.Module):
    """Most networks here: a linear layer, `middle` (what the class is about), a linear layer."""

    def __init__(self, i=4, h=6, o=3):
        super().__init__()
        self.first = nn.Linear(i, h)
        self.last = nn.Linear(h, o)

    def middle(self, h):
        return h

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


class OneNumber(Body):
    """Outputs of shape `(n,)`."""

    def __init__(self):
        super().__init__(o=1)

    def forward(self, x):
        return super().forward(x).squeeze(-1)


class Grid(Body):
    """Outputs of shape `(n, 3, 4)`."""

    def __init__(self):
        super().__init__(o=12)

    def forward(self, x):
        return super().forward(x).reshape(-1, 3, 4)


class TwoInputs(Body):
    def forward(self, left, right):
        return super().forward(left * right.sin()) + super().forward(right)


class NestedInputs(Body):
    """One argument that is itself a tuple of a tensor and a dict."""

    def forward(self, pair):
        left, more = pair
        return super().forward(left * more["right"].sin())


class DictOutput(Body):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return {"hidden": h, "answer": self.last(h)}


@dataclass
class Answer:
    hidden: torch.Tensor
    logits: torch.Tensor


class DataclassOutput(Body):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return Answer(hidden=h, logits=self.last(h))


class ThreeTimes(Body):
    """One linear layer applied three times in a forward pass."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(6, 6)

    def middle(self, h):
        for _ in range(3):
            h = torch.tanh(self.again(h))
        return h


class TiedLayers(Body):
    """Two modules that own one weight, each with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.right.weight = self.left.weight

    def middle(self, h):
        return torch.tanh(self.right(torch.tanh(self.left(h))))


class TiedAutoencoder(nn.Module):
    """A weight and its transpose, used in two layers."""

    def __init__(self):
        super().__init__()
        self.code = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return F.linear(torch.tanh(self.code(x)), self.code.weight.t(), self.shift)


class Functional(Body):
    """A weight that is a parameter of the network itself; subclasses say how it is used."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(6, 6) / 3)
        self.b = nn.Parameter(torch.randn(6) / 3)


class Matmul(Functional):
    def middle(self, h):
        return torch.tanh(h @ self.W + self.b)


class MatmulTransposed(Functional):
    def middle(self, h):
        return torch.tanh(torch.matmul(h, self.W.t()) + self.b)


class MatmulFromTheLeft(Functional):
    """The weight comes first and the inputs are columns: `(W h^T)^T`."""

    def middle(self, h):
        return torch.tanh((self.W @ h.t()).t() + self.b)


class Addmm(Functional):
    def middle(self, h):
        return torch.tanh(torch.addmm(self.b, h, self.W, beta=0.5, alpha=2.0))


class Einsum(Functional):
    def middle(self, h):
        return torch.tanh(torch.einsum("nd,de->ne", h, self.W) * self.b)


class Expression(Functional):
    """Hidden values `h` of shape `(n, 6)`, and parameters, in a formula."""

    def __init__(self, formula):
        super().__init__()
        self.s = nn.Parameter(torch.tensor(0.7))
        self.column = nn.Parameter(torch.randn(6, 1) / 3)
        self.flat = nn.Parameter(torch.randn(36) / 3)
        self.formula = formula

    def middle(self, h):
        return torch.tanh(self.formula(self, h))


EXPRESSIONS = {
    "add with a factor": lambda p, h: torch.add(h, p.b, alpha=2),
    "subtract with a factor": lambda p, h: torch.sub(p.b, h, alpha=0.5),
    "divide by": lambda p, h: p.b / (h + 2),
    "add in place": lambda p, h: h.sin().add_(p.b, alpha=2),
    "multiply in place": lambda p, h: h.sin().mul_(p.b).sub_(p.s),
    "operators in place": lambda p, h: operators_in_place(h.sin(), p),
    "outer product": lambda p, h: h[:, :1] * p.b + h[:, 1:2],
    "product of parameters": lambda p, h: h * (p.b * p.s) + p.b * p.b,
    "column": lambda p, h: (h.unsqueeze(2) * p.column).squeeze(2) * 2,
    "column and row": lambda p, h: (h[:, None, :] * p.column + p.b).sum(1),
    "no inputs at all": lambda p, h: h * 0 + p.b,
    "addcmul": lambda p, h: torch.addcmul(p.b, h, p.column.squeeze(1), value=0.5),
    "lerp": lambda p, h: torch.lerp(h, p.b.expand_as(h), p.s),
    "view": lambda p, h: h @ p.flat.view(6, 6),
    "reshaped and transposed": lambda p, h: nn.functional.linear(h, p.flat.reshape(6, 6).t()),
    "bmm": lambda p, h: torch.bmm(h[:, None], p.W.expand(len(h), 6, 6)).squeeze(1),
    "bmm of one batch": lambda p, h: torch.bmm(h[None], p.W[None])[0],
    "baddbmm": lambda p, h: torch.baddbmm(p.b.expand(1, 1, 6), h[None], p.W[None], beta=2)[0],
    "matrix times vectors": lambda p, h: torch.matmul(p.W, h.unsqueeze(2)).squeeze(2),
    "batch last": lambda p, h: (p.W @ h.t() + p.column).t(),
    "einsum of three": lambda p, h: torch.einsum("nd,de,e->ne", h, p.W, p.b),
    "tensordot": lambda p, h: torch.tensordot(h, p.W, dims=([1], [1])),
    "inner": lambda p, h: torch.inner(h, p.W),
    "mv": lambda p, h: torch.mv(h, p.b)[:, None] * h,
    "addmv": lambda p, h: torch.addmv(h[:, 0], h, p.b, alpha=3)[:, None] + h,
    "addr": lambda p, h: h @ torch.addr(p.W, p.b, p.column.squeeze(1)),
    "norm of the weight": lambda p, h: nn.functional.linear(h, p.W / p.W.norm(), p.b),
    "stacked": lambda p, h: h @ torch.cat([p.W[:3], p.flat.view(6, 6)[3:]]),
    "functional norms": lambda p, h: nn.functional.layer_norm(h, (6,), p.b, p.column.flatten()),
    "group norm of a batch": lambda p, h: nn.functional.group_norm(h, 2, p.b, p.b),
    "clamped weight": lambda p, h: nn.functional.linear(h, p.W.clamp(-0.3, 0.3)),
    "power": lambda p, h: (h.square() + 1) ** p.s,
    "where": lambda p, h: torch.where(h > 0, p.b, h),
    "masked fill": lambda p, h: h.masked_fill(h > 0, 0) + torch.maximum(h, p.b),
    "gathered rows": lambda p, h: p.W[h.argmax(1)] + h,
    "index select": lambda p, h: p.W.index_select(0, h.argmax(1)) * h,
    "embedding": lambda p, h: nn.functional.embedding(h.argmax(1), p.W) * h,
    "bilinear": lambda p, h: nn.functional.bilinear(h[:, :2], h[:, 2:5], p.flat.view(6, 2, 3), p.b),
    "prelu": lambda p, h: nn.functional.prelu(h, p.b),
    "convolution": lambda p, h: nn.functional.conv1d(h[:, None], p.b.view(2, 1, 3)).flatten(1)[:, :6],
    "convolution of one": lambda p, h: nn.functional.conv1d(h.t(), p.W[:, :, None]).t(),
    "unfold": lambda p, h: h.unfold(1, 1, 1).squeeze(2) @ p.W,
}


def operators_in_place(h, p):
    h += p.b
    h *= p.column.squeeze(1)
    h -= p.s
    h /= 2 + p.s.cos()
    return h


class Borrowed(Body):
    """A functional call with a weight that another module owns, and uses itself."""

    def __init__(self):
        super().__init__()
        self.owner = nn.Linear(6, 6)

    def middle(self, h):
        return F.linear(torch.tanh(self.owner(h)), self.owner.weight)


class Sliced(Functional):
    """Slices of one parameter, as in a fused projection."""

    def middle(self, h):
        upper = F.linear(h, self.W[:2], self.b[:2])
        return torch.tanh(torch.cat([upper, F.linear(h, self.W[2:], self.b[2:])], dim=-1))


class Masked(Functional):
    """Weights that are a function of the parameter, as in pruning."""

    def middle(self, h):
        return F.linear(h, self.W * torch.ones_like(self.W).tril(), torch.tanh(self.b))


class Scaled(Body):
    """A layer scale, a shift, and a temperature that is a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.shift = nn.Parameter(torch.zeros(1, 6))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = h + self.scale * torch.sin(h) + self.shift
        return self.last(h) / self.temperature.exp()


class Subtracted(Functional):
    """A shift that is taken away, and a scale that divides."""

    def middle(self, h):
        return (h - self.b) / (2 + self.W[0].cos())


class Unused(Body):
    """A parameter on which the outputs do not depend, between others on which they do."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(2, 2)
        self.tail = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.tail


class HalfUnused(Body):
    """Outputs of which only the first depends on the middle layer."""

    def __init__(self):
        super().__init__(o=2)
        self.extra = nn.Linear(6, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return torch.cat([self.extra(h), self.last(h).detach() + h[:, :2]], dim=-1)


class Bilinear(Body):
    def __init__(self):
        super().__init__()
        self.pair = nn.Bilinear(6, 6, 6)

    def middle(self, h):
        return torch.tanh(self.pair(h, h.sin()))


class LowRank(Body):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, 6) / 3)
        self.lora_B = nn.Parameter(torch.randn(6, 2) / 3)

    def middle(self, h):
        return torch.tanh(self.base(h) + 0.5 * F.linear(F.linear(h, self.lora_A), self.lora_B))


class PRelu(Body):
    """A slope for all channels, then one for each."""

    def __init__(self):
        super().__init__()
        self.one, self.each = nn.PReLU(), nn.PReLU(6)

    def middle(self, h):
        return self.each(self.one(h) - 0.1)


def half_frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def weight_norm():
    net = mlp()
    nn.utils.parametrizations.weight_norm(net[2])
    return net


def spectral_norm():
    net = mlp()
    nn.utils.parametrizations.spectral_norm(net[2])
    return net
