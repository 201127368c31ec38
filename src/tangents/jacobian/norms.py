"""The diagonal of ``J S J^T``, without its other entries and without a loop over inputs."""

import torch
from torch import Tensor

from tangents.jacobian.factors import Lookup, Outer, Rows, chunks
from tangents.jacobian.features import (
    Features,
    Segment,
    column_chunks,
    columns_of,
    device_of,
    only_lookups,
    rooted,
    scale_rows,
    segments,
    single_outers,
    uncut,
)
from tangents.priors import BoundPrior, Weight


def squared_norms(block: Features, prior: BoundPrior, dtype: torch.dtype) -> Tensor:
    """``diag(J S J^T)`` of one block, ``(n, o)``, without its other entries."""
    total = torch.zeros(block.n, block.o, dtype=dtype, device=device_of(block))
    generic = block.generic_rows()
    for name in prior.columns.names:
        if name in generic:
            continue
        for segment in segments([block], name, uncut(name, prior)):
            total = total + _segment_norms(segment, block, prior, dtype)
    for name, rows in generic.items():
        parts = [scale_rows(rows[part].to(dtype), prior, name) for part in chunks(rows.shape[0], rows.shape[1] * 8)]
        total = total + torch.cat([torch.linalg.vecdot(part, part) for part in parts]).view(block.n, block.o)
    return total


def _segment_norms(segment: Segment, block: Features, prior: BoundPrior, dtype: torch.dtype) -> Tensor:
    outers = single_outers(segment, [block])
    weight = prior.weights[segment.name]
    if outers and not isinstance(weight, Tensor):
        f = outers[0]
        separable = isinstance(weight, float) or f.size == weight[0].shape[0] * weight[1].shape[0]
        if separable and (f.T == 1 or f.T * (f.q + f.o * f.r) < f.o * f.size):
            return _norms_by_positions(f, prior.root(segment.name, dtype), dtype)
    if only_lookups(segment, [block]) and isinstance(weight, float):
        return _lookup_norms([f for f in segment.of(block) if isinstance(f, Lookup)], dtype) * weight
    found = segment.of(block)
    if len(found) == 1 and isinstance(found[0], Rows) and isinstance(weight, float):
        norms: Tensor = torch.linalg.vector_norm(found[0].values, dim=2, dtype=dtype)
        return norms.square() * weight
    total = torch.zeros(block.n, block.o, dtype=dtype, device=device_of(block))
    for lo, hi in column_chunks(segment, [block], total.numel() * total.element_size(), prior):
        R = columns_of(segment, block, lo, hi, prior, dtype)
        total += torch.linalg.vecdot(R, R).reshape(block.n, block.o)
    return total


def _norms_by_positions(f: Outer, root: Weight, dtype: torch.dtype) -> Tensor:
    parts = []
    for rows in chunks(f.n, (f.T * f.T * (1 + 2 * f.o) + f.T * (f.q + f.o * f.r)) * 8):
        a, g, weight = rooted(f, rows, dtype, root)
        if f.T == 1:
            parts.append(g.square().sum((2, 3)) * a.square().sum((1, 2)).unsqueeze(1) * weight)
        else:
            inner, outer = a @ a.transpose(1, 2), g @ g.transpose(2, 3)
            parts.append(torch.einsum("ncts,nts->nc", outer, inner) * weight)
    return torch.cat(parts)


def _lookup_norms(found: list[Lookup], dtype: torch.dtype) -> Tensor:
    """Positions that read the same entry add up before they are squared."""
    index = torch.cat([f.index for f in found], 1)
    g = torch.cat([f.g for f in found], 2)
    parts = []
    for rows in chunks(index.shape[0], (g.shape[1] * g.shape[2] * (g.shape[3] + 2 * g.shape[2])) * 8):
        h, same = g[rows].to(dtype), (index[rows].unsqueeze(2) == index[rows].unsqueeze(1)).to(dtype)
        parts.append(torch.einsum("ncts,nts->nc", h @ h.transpose(2, 3), same))
    return torch.cat(parts)
