"""Networks that hide which input owns which row, and operations that hide what they did."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from networks.plain import Body


class SequenceFirst(nn.Module):
    """Layers that run on `(T, n, d)`: with T = n, sizes do not tell steps from inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = self.norm(torch.tanh(self.first(x.transpose(0, 1))))
        return self.last(h.cumsum(0)).sum(0)


class TimeMajor(nn.Module):
    """Time and batch folded into one axis, time first."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        n, t, d = x.shape
        h = torch.tanh(self.first(x.transpose(0, 1).reshape(t * n, d)))
        return self.last(h).reshape(t, n, 2).cumsum(0).tanh().sum(0)


class Windows(nn.Module):
    """Windows of an image folded into the batch, images first or windows first."""

    def __init__(self, windows_first):
        super().__init__()
        self.first, self.norm = nn.Linear(2, 4), nn.LayerNorm(4)
        self.conv = nn.Conv2d(4, 2, 2)
        self.windows_first = windows_first

    def forward(self, x):
        n, c = x.shape[:2]
        x = x.reshape(n, c, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(n, 4, 2, 2, c)
        x = x.transpose(0, 1) if self.windows_first else x
        h = self.norm(self.first(x.reshape(4 * n, 2, 2, c)).sin())
        h = self.conv(h.permute(0, 3, 1, 2)).flatten(1)
        h = h.reshape(4, n, 2).transpose(0, 1) if self.windows_first else h.reshape(n, 4, 2)
        return (h * h.cumsum(1)).sum(1)


class Permuted(Body):
    """Inputs reordered inside the network, by a fixed order or by their values, and back."""

    def __init__(self, by_value):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.by_value = by_value

    def middle(self, h):
        order = h[:, 0].argsort() if self.by_value else torch.arange(len(h)).roll(2)
        back = order.argsort()
        return torch.tanh(self.inner(h[order]))[back]


class DoubledBatch(Body):
    """Two views of every input in one batch, as in contrastive networks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def middle(self, h):
        left, right = torch.tanh(self.inner(torch.cat([h, h.sin()]))).chunk(2)
        return left * right


class Experts(nn.Module):
    """Tokens routed to one of two experts by a gate that looks at them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(3, 2)
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        h = tokens.new_zeros(len(tokens), 4)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            h[mine] = weight[mine, None] * torch.tanh(expert(tokens[mine]))
        return self.head(h.reshape(*x.shape[:-1], 4)).mean(1)


class Ragged(nn.Module):
    """Tokens that are no padding, taken out of their sequences, and put back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, padding):
        h = x.new_zeros(*x.shape[:2], 4)
        h[~padding] = torch.tanh(self.first(x[~padding]))
        return self.last(h).sum(1)


class EarlyExit(Body):
    """A layer for some of the inputs only."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(6, 6)

    def middle(self, h):
        on = h[:, 0] > 0
        return h.index_put((on,), torch.tanh(self.more(h[on])))


class BatchInChannels(nn.Module):
    """The batch folded into the channels of one grouped convolution, as in style transfer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        n, c, length = x.shape
        weight, bias = self.conv.weight.repeat(n, 1, 1), self.conv.bias.repeat(n)
        h = F.conv1d(x.reshape(1, n * c, length), weight, bias, groups=n)
        return self.head(torch.tanh(h).reshape(n, 3, -1).mean(-1))


class SharedHyper(Body):
    """Weights made by a linear layer from a code that is the same for all inputs."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(1, 3))
        self.make = nn.Linear(3, 36)

    def middle(self, h):
        return torch.tanh(F.linear(h, self.make(self.code).reshape(6, 6)))


class OwnHyper(Body):
    """Weights made by a linear layer from each input."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(6, 36)

    def middle(self, h):
        W = self.make(h).reshape(-1, 6, 6)
        return torch.tanh(torch.bmm(W, h.unsqueeze(-1)).squeeze(-1))


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
