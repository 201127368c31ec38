"""Peak memory of one call, without sampling.

On a GPU the caching allocator counts. On a CPU the kernel does: writing 5 to /proc/self/clear_refs sets the process's
high-water mark back to what is resident now, and VmHWM of /proc/self/status holds the peak afterwards. Where that is
not permitted, ru_maxrss of a fresh process gives an upper bound. Each contestant has a process of its own, so that no
other's pages are in its baseline.

glibc's malloc keeps blocks of up to 32 MiB that were freed, which adds to the resident size what nothing holds any
more: up to three times what is held, and differently each time. So the number that is compared is taken with blocks
above 1 MiB given back when freed (the same for every contestant); ours is also taken with malloc as it is.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.harness import Settings

ANSWER = "benchmark-memory:"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}


def free_bytes(device: str) -> int:
    """Bytes that a contestant may take: what is free, less a tenth."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(0.9 * (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()))
    available = status_bytes("MemAvailable", "/proc/meminfo") or total_bytes()
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return int(0.9 * available)


def total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def status_bytes(key: str, path: str = "/proc/self/status") -> int | None:
    """A number of kB in one of the kernel's tables, in bytes; None where there is no such table or key."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":")), None)


def reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return status_bytes("VmHWM") is not None


def return_free_pages() -> None:
    """Gives the pages that malloc keeps for later back to the system, so that they do not hide the next call's."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Peak:
    """`with Peak(device) as peak: ...`, then `peak.bytes`: the peak inside above what was held on entering."""

    def __init__(self, device: str) -> None:
        self.device, self.bytes, self.method = device, 0, ""

    def __enter__(self) -> "Peak":
        if self.device == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before, self.method = torch.cuda.memory_allocated(), "allocator"
            return self
        return_free_pages()
        self.method = "high-water mark" if reset_high_water_mark() else "upper bound (ru_maxrss)"
        self.before = status_bytes("VmRSS") or max_rss()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            after = torch.cuda.max_memory_allocated()
        else:
            after = status_bytes("VmHWM") if self.method == "high-water mark" else max_rss()
        self.bytes = max(0, (after or 0) - self.before)


def max_rss() -> int:
    """The largest resident size of this process so far, in bytes (Linux gives kB, macOS bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_fresh_process(job: str, contestant: str, settings: "Settings", give_back: bool = True) -> dict[str, Any]:
    """Runs one contestant of one job in a process of its own and returns what it measured, or how it ended."""
    command = [sys.executable, "-m", "benchmarks", "--measure", job, contestant]
    command += ["--device", settings.device, "--size", settings.size]
    command += ["--data", str(settings.data)] if settings.data else []
    environment = {**os.environ, **(GIVE_BACK if give_back else {})}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    if done.returncode == -9:
        return {"status": "out of memory (ended by the system)"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"status": f"failed in a process of its own: {last}"[:200]}
