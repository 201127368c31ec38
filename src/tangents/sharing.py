"""A private copy of the user's network that shares its weights and nothing else."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"linearize takes a torch.nn.Module, not {type(model).__name__}")
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def share(original: nn.Module, chosen: set[str]) -> nn.Module:
    """A copy in eval mode whose parameters share the original's storage."""
    memo: dict[int, Any] = {}
    names = {id(p): name for name, p in original.named_parameters()}
    for p in original.parameters():
        needs_grad = names[id(p)] in chosen
        same = p.requires_grad == needs_grad and not p.requires_grad
        memo[id(p)] = p if same else nn.Parameter(p.detach(), requires_grad=needs_grad)
    for module in original.modules():
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_leaf:  # weights derived by hooks: torch refuses to copy them
                memo[id(value)] = value.detach()
    try:
        with torch.no_grad():  # scripted modules are copied by value: into leaves, then
            duplicate = copy.deepcopy(original, memo)
    except Exception as error:
        raise TypeError(
            f"the network cannot be copied ({error}); linearize works on a copy that shares its weights: remove the "
            "attribute that cannot be copied, or give its class a __deepcopy__"
        ) from error
    duplicate.eval()
    for module in duplicate.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.max_norm is not None:
                raise ValueError(
                    "an embedding with max_norm rewrites its weights whenever it is used, so there is no fixed theta "
                    "to linearise at: set its max_norm to None"
                )
            module.sparse, module.scale_grad_by_freq = False, False  # they alter gradients, not the function
    return duplicate


def fingerprint(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Identity, place and version of each parameter."""
    return {name: (id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for name, p in model.named_parameters()}


def refuse_meta(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and holds no values: load the weights first")


def tell_about_training_mode(model: nn.Module) -> None:
    moody = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if any(m.training and isinstance(m, moody) for m in model.modules()):
        warnings.warn(
            "the network is in training mode and has batch norm or dropout; it is linearised in eval mode (your "
            "network stays as it is). Call model.eval() first to silence this.",
            stacklevel=4,
        )
