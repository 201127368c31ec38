"""What the machine can do, and what a forward pass asks of it: speed, free memory, operations, bytes."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
CALL = 1e-5  # seconds that any operation takes, however small


@functools.cache
def machine_speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations and bytes a second, from a small matrix product and a copy: enough to compare ways."""
    side = 4096 if device.type == "cuda" else 512
    a = torch.ones(side, side, device=device, dtype=dtype)
    product = _best_seconds(lambda: a @ a, device)
    copied = torch.ones(side * 2**13, device=device)
    copy = _best_seconds(copied.clone, device)
    return 2 * side**3 / product, 8 * copied.numel() / copy


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-7)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    free = 4 * 2**30
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        for limit, used in CGROUP:
            free = min(free, _number_in(limit, free) - _number_in(used, 0))
    except (OSError, StopIteration):
        pass
    return free


def _number_in(path: str, otherwise: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return otherwise


class Operations(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention, by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward pass keeps, parameters apart."""

    def __init__(self, known: set[int]) -> None:
        self.total = 0
        self._known = known
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._known:
            self._known.add(place)
            self.total += tensor.untyped_storage().nbytes()
        return tensor
