"""Networks on images, signals and volumes: convolutions and the norms between them."""

import torch
from torch import nn

CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class Pooled(nn.Sequential):
    """Some layers, the mean over all positions, a linear layer."""

    def __init__(self, *layers, channels, o=3):
        super().__init__(*layers)
        self.head = nn.Linear(channels, o)

    def forward(self, x):
        for layer in list(self)[:-1]:
            x = layer(x)
        return self.head(torch.tanh(x).flatten(2).mean(-1))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def flattened():
    return nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, 3))


def convolution(dimensions, **options):
    """A pointwise convolution, the convolution in question, the mean over positions."""
    first = CONVOLUTION[dimensions](2, 4, 1)
    return Pooled(first, nn.Tanh(), CONVOLUTION[dimensions](4, 4, **options), channels=4)


def transposed(dimensions, **options):
    first = CONVOLUTION[dimensions](2, 4, 1)
    return Pooled(first, nn.Tanh(), TRANSPOSED[dimensions](4, 4, **options), channels=4)


def separable():
    """A depthwise and a pointwise convolution, as in MobileNet."""
    return Pooled(
        nn.Conv2d(2, 6, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(),
        nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU6(),
        nn.Conv2d(6, 4, 1),
        channels=4,
    )


def normed(norm, dimensions=2):
    """A convolution, then a norm over four channels."""
    return Pooled(CONVOLUTION[dimensions](2, 4, 2), nn.Tanh(), norm, channels=4)


class Block(nn.Module):
    """A residual block with batch norm, whose ReLU and sum may be in place."""

    def __init__(self, channels, inplace):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)
        self.inplace = inplace

    def forward(self, x):
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.inplace:
            h += x
        else:
            h = h + x
        return self.relu(h)


def residual(inplace=False):
    blocks = Block(4, inplace), Block(4, inplace)
    stem = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=inplace)
    return Pooled(*stem, *blocks, channels=4)


class SharedConvolution(nn.Module):
    """One convolution on two scales of an image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        h = torch.tanh(self.conv(x))
        small = torch.tanh(self.conv(nn.functional.avg_pool2d(h, 2)))
        return self.head(h.mean((2, 3)) + small.mean((2, 3)))


class ConvNextLike(nn.Module):
    """Depthwise convolution, channels-last norm and linears, a layer scale, a residual."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 2, stride=2)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.channel_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(nn.functional.gelu(self.up(h)))
        x = x + self.channel_scale * h.permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Down, up, and a skip connection; an output for each pixel, `(n, 1, 4, 4)`."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.leave = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x):
        skip = torch.tanh(self.norm(self.enter(x)))
        h = torch.tanh(self.up(torch.tanh(self.down(skip))))
        return self.leave(torch.cat([skip, h], dim=1))
