"""Networks that hide which input owns which row of an operation: folds, orders, routes, tables."""

import torch
import torch.nn.functional as F
from torch import nn

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


class Ranked(Body):
    """Inputs put in the order of their first entry by comparisons and a matrix product, and back."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        rank = (x[:, :1] > x[:, 0]).sum(1)
        order = (rank == torch.arange(len(x))[:, None]).to(x.dtype)
        return self.last(order.t() @ torch.tanh(self.inner(order @ torch.tanh(self.first(x)))))


class Rectified(nn.Module):
    """A linear layer and a ReLU on `(T, n, 1)`: where it is dead no row shows whose it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.inner.weight.abs_()

    def forward(self, x):
        return torch.relu(self.inner(x.transpose(0, 1))).sum(0)


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
