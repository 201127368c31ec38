"""Networks on sequences: recurrent ones, attention, embeddings, positions."""

import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    """A recurrent layer and a linear one on its last step."""

    def __init__(self, kind, batch_first=True, **options):
        super().__init__()
        self.layer = kind(3, 4, batch_first=batch_first, **options)
        width = options.get("proj_size", 4) * (1 + options.get("bidirectional", False))
        self.head = nn.Linear(width, 2)
        self.batch_first = batch_first

    def forward(self, x):
        if self.batch_first:
            return self.head(self.layer(x)[0][:, -1])
        return self.head(self.layer(x.transpose(0, 1))[0][-1])


class Packed(Recurrent):
    """Sequences of different lengths, which packing sorts and folds by time."""

    def __init__(self):
        super().__init__(nn.GRU)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][-1])


class Unrolled(nn.Module):
    """A recurrent cell called step by step."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def transformer_layer(batch_first, norm_first=False):
    return nn.TransformerEncoderLayer(
        4, nhead=2, dim_feedforward=6, dropout=0.1, batch_first=batch_first, norm_first=norm_first
    )


class Transformer(nn.Module):
    """Two encoder layers, in either layout; a mask says which tokens are padding."""

    def __init__(self, batch_first, norm_first=False):
        super().__init__()
        self.enter = nn.Linear(3, 4)
        layer = transformer_layer(batch_first, norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 2)
        self.batch_first = batch_first

    def forward(self, x, padding=None):
        h = self.enter(x)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h, src_key_padding_mask=padding)
        return self.head(h.mean(1 if self.batch_first else 0))


class Attention(nn.Module):
    """`nn.MultiheadAttention`: of x to itself, or to a sequence of another width."""

    def __init__(self, batch_first=True, width=None, **options):
        super().__init__()
        if width:
            options |= {"kdim": width, "vdim": width}
        self.attend = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)
        self.head = nn.Linear(4, 2)
        self.batch_first = batch_first

    def forward(self, x, other=None, padding=None):
        other = x if other is None else other
        if not self.batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        h, _ = self.attend(x, other, other, key_padding_mask=padding, need_weights=padding is None)
        return self.head(torch.tanh(h).sum(1 if self.batch_first else 0))


class FusedAttention(nn.Module):
    """Causal attention on a fused projection by `scaled_dot_product_attention`."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(4, 12)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.projection(x).reshape(n, t, 3, 2, 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h.transpose(1, 2).reshape(n, t, 4)[:, -1])


class Words(nn.Module):
    """Embeddings with a padding row, averaged."""

    def __init__(self, padding_idx=None, tied=False, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=padding_idx, sparse=sparse)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7 if tied else 3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embed(tokens))).mean(1))


class BagOfWords(nn.Module):
    def __init__(self, mode="sum"):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, mode=mode)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.bag(tokens)))


class Positions(nn.Module):
    """Tokens plus embedded positions, which have no batch axis, plus a learned table and a start."""

    def __init__(self, length=4):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.position = nn.Embedding(length, 4)
        self.table = nn.Parameter(torch.zeros(1, length, 4))
        self.cls = nn.Parameter(torch.zeros(1, 1, 4))
        self.norm = nn.LayerNorm(4)
        self.mix = transformer_layer(batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        n, t = tokens.shape
        h = self.embed(tokens) + self.position(torch.arange(t, device=tokens.device))
        h = self.norm(h + self.table[:, :t])
        h = torch.cat([self.cls.expand(n, -1, -1), h], dim=1)
        return self.head(self.mix(h)[:, 0])


class RelativePositions(nn.Module):
    """One table of relative positions that goes through the key layer, for all inputs at once."""

    def __init__(self, length=4):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(2 * length - 1, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)
        steps = torch.arange(length)
        self.register_buffer("relative", steps[:, None] - steps[None, :] + length - 1)

    def forward(self, x):
        positions = self.key(self.norm(self.table.weight))
        q, k = self.query(x), self.key(self.norm(x))
        scores = q @ k.transpose(1, 2)
        to_position = (q @ positions.t()).gather(2, self.relative.expand(len(x), -1, -1))
        return self.head((scores + to_position).softmax(-1) @ x).mean(1)
