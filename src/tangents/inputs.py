"""The inputs whose outputs make the rows of a Jacobian: tensors, pytrees of tensors, or data that is streamed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler
from torch.utils.data.sampler import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

Batch = Any  # a tensor, or a pytree of tensors with one leading dimension


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch that carry its leading dimension."""
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim() > 0]


def length(batch: Batch) -> int:
    """The leading dimension that all tensors of a batch share."""
    leaves = tensors(batch)
    if isinstance(batch, dict | list | tuple) and not batch:
        raise ValueError("the inputs are empty: at least one input is needed")
    if isinstance(batch, Tensor) and batch.dim() == 0:
        raise ValueError(
            "the input is a single number; it needs a leading dimension, one row an input: x.reshape(1, -1)"
        )
    if not leaves:
        raise TypeError(
            "the inputs hold no tensor with a leading dimension: pass a tensor, a pytree (dict, tuple, list) of "
            f"tensors, a Dataset or a DataLoader; got {type(batch).__name__}"
        )
    sizes = {leaf.shape[0] for leaf in leaves}
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ValueError(f"the inputs' leading dimensions differ (shapes {shapes}): each tensor needs one row an input")
    for leaf in leaves:
        if leaf.is_complex():
            raise TypeError("complex inputs are not supported: pass the real and imaginary parts as real tensors")
        if leaf.is_meta:
            raise ValueError("the inputs are on the meta device and hold no values: pass real tensors")
    return sizes.pop()


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """Some rows of a batch, in its own structure."""
    return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, batch)


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device; dtypes are left alone."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def requires_grad(batch: Batch) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors(batch))


def signature(batch: Batch) -> tuple[Any, ...]:
    """What a network may choose its path by, short of the values: structure, shapes and dtypes."""
    leaves, spec = tree_flatten(batch)
    return (str(spec), *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves))


class Inputs:
    """``n`` inputs that can be read in batches, any number of times, always in the same order."""

    def __init__(self, count: int, read: Callable[[int], Iterator[Batch]], whole: Batch | None = None) -> None:
        if count == 0:
            raise ValueError("the data set is empty: at least one input is needed")
        self.n = count
        self._read = read
        self.whole = whole  # the pytree itself, or None where the data is streamed
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [leaf._version for leaf in tensors(self.whole) if not leaf.is_inference()]

    def check_unchanged(self) -> None:
        """Raise if the inputs were overwritten in place since they were read."""
        if self._now() != self._versions:
            raise ValueError("the inputs were overwritten in place since this operator was made: make it again")

    def batches(self, size: int) -> Iterator[Batch]:
        """The inputs in order, at most ``size`` at a time."""
        return self._read(size)

    def first(self, count: int) -> Batch:
        return next(self.batches(min(count, self.n)))

    @property
    def requires_grad(self) -> bool:
        return self.whole is not None and requires_grad(self.whole)


def read_inputs(X: Any) -> Inputs:
    """Whatever a user calls inputs, as `Inputs`; bad ones are refused here, before any work."""
    if isinstance(X, Inputs):
        return X
    if isinstance(X, DataLoader):
        return _from_loader(X)
    if isinstance(X, IterableDataset):
        return _from_loader(DataLoader(X, batch_size=64))
    if isinstance(X, Dataset):
        return _from_dataset(X)
    batch = dict(X) if isinstance(X, Mapping) else X
    count = length(batch)

    def read(size: int) -> Iterator[Batch]:
        return (take(batch, slice(i, i + size)) for i in range(0, count, size))

    return Inputs(count, read, whole=batch)


def _from_dataset(dataset: Dataset[Any]) -> Inputs:
    same = _SameEveryTime()

    def read(size: int) -> Iterator[Batch]:
        return same.watch(map(_only_inputs, _iterate(DataLoader(dataset, batch_size=size))))

    return Inputs(len(dataset), read)  # type: ignore[arg-type]  # a map-style data set has a length


def _from_loader(loader: DataLoader[Any]) -> Inputs:
    if isinstance(loader.sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        raise ValueError(
            "the DataLoader shuffles: its rows come in another order on every pass, so products with them would be "
            "wrong without a sign of it; build it with shuffle=False"
        )

    same = _SameEveryTime()

    def read(size: int) -> Iterator[Batch]:
        for batch in same.watch(map(_only_inputs, _iterate(loader))):
            for start in range(0, length(batch), size):
                yield take(batch, slice(start, start + size))

    plain = loader.batch_size is not None and type(loader.sampler) is SequentialSampler
    if plain and not loader.drop_last:
        return Inputs(len(loader.sampler), read)  # type: ignore[arg-type]
    return Inputs(sum(length(_only_inputs(item)) for item in _iterate(loader)), read)


def _iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """A pass over a loader, which draws a seed when it begins: the user's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return iter(loader)


class _SameEveryTime:
    """Compares a sum over each whole pass with the first one's: rows that shuffle or change would make products wrong
    without a sign of it."""

    def __init__(self) -> None:
        self._first: float | None = None

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        total, row = 0.0, 0
        for batch in batches:
            count = length(batch)
            weights = torch.arange(row + 1, row + count + 1, dtype=torch.float64)
            for leaf in tensors(batch):
                rows = leaf.detach().reshape(count, -1).sum(1, dtype=torch.float64).cpu()
                total += float((rows * weights).sum())
            row += count
            yield batch
        self._first = total if self._first is None else self._first
        if abs(total - self._first) > 1e-9 * abs(self._first):  # NaN is the network's to name
            raise ValueError(
                "the data is not the same on every pass (it shuffles, or adds noise or random changes): products would "
                "be wrong; stream it in a fixed order, without augmentation"
            )


def _only_inputs(item: Any) -> Batch:
    """The inputs of what a loader yields: inputs alone, or ``(inputs, targets)``."""
    if isinstance(item, tuple | list) and len(item) in (1, 2):
        item = item[0]
    return dict(item) if isinstance(item, Mapping) else item
