"""Networks that hide what an operation did: custom functions, checkpoints, values overwritten."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from networks.plain import Body


class Forces(nn.Module):
    """Outputs that are a gradient with respect to the inputs, as of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_(True)
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class TwoKindsOfUse(Body):
    """One weight in a layer, in an elementwise function, detached, and without gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def middle(self, h):
        W = self.inner.weight
        with torch.no_grad():
            target = self.inner(h)
        return torch.tanh(self.inner(h)) * W.square().mean(0) + F.linear(h, W.detach()) - target


class StraightThrough(Body):
    """Rounded values with the gradient of the identity, for activations and for weights."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def middle(self, h):
        h = h + (h.round(decimals=1) - h).detach()
        W = self.inner.weight
        return torch.tanh(F.linear(h, W + (W.round(decimals=1) - W).detach(), self.inner.bias))


class MappedOverRows(Body):
    """A layer that sees one row at a time, through `torch.func.vmap`."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def middle(self, h):
        return torch.func.vmap(lambda row: torch.tanh(self.inner(row)))(h)


class Cube(torch.autograd.Function):
    """Has a backward pass that can be differentiated, and no forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class OwnLinear(torch.autograd.Function):
    """A linear layer written as a custom function, its weight an argument."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class LinearInside(torch.autograd.Function):
    """Runs a module's operations inside, where nothing is recorded."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return torch.tanh(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        grad = grad * (1 - torch.tanh(F.linear(x, weight, bias)) ** 2)
        return grad @ weight, grad.t() @ x, grad.sum(0)


class CustomFunctions(Body):
    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(6, 6) / 3)
        self.inner = nn.Linear(6, 6)

    def middle(self, h):
        h = OwnLinear.apply(Cube.apply(h), self.W)
        return LinearInside.apply(h, self.inner.weight, self.inner.bias)


class Gated(Body):
    """A layer for some inputs, for the others the same weight inside a custom function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        h, gate = torch.tanh(self.first(x)), (x[:, :1] > 0).to(x.dtype)
        return self.last(gate * self.inner(h) + (1 - gate) * OwnLinear.apply(h.sin(), self.inner.weight))


class Checkpointed(Body):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.use_reentrant = use_reentrant

    def middle(self, h):
        return checkpoint(self.inner, h, use_reentrant=self.use_reentrant)


class InPlaceOnOutput(Body):
    """A layer's output overwritten: as a whole, and through a view."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def middle(self, h):
        h = self.inner(h)
        h.mul_(2).sin_()
        h = self.norm(h)
        h[:, :2].mul_(0.5)
        h[:, 3] = h[:, 4].clone()
        h.view(-1)[::2].add_(1.0)
        return h


class InPlaceOnInput(Body):
    """What a parameter was added to, or multiplied with, overwritten afterwards."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.inner = nn.Linear(6, 6)

    def middle(self, h):
        kept = h.sin()
        h = kept + self.shift
        kept.mul_(3)
        buffer = torch.empty_like(h)
        buffer.copy_(h).tanh_()
        return self.inner(buffer) + kept


class WrittenIntoBuffer(Body):
    """Outputs of a layer collected in a buffer, row by row and column by column."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def middle(self, h):
        collected = torch.zeros_like(h)
        collected[:, :3] = self.inner(h[:, :3])
        collected[:, 3:] += self.inner(h[:, 3:]).tanh()
        return collected
