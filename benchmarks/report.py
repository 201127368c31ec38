"""What a run leaves behind: one JSON a job with versions and machine, and Markdown tables made from those."""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PACKAGES = ("torch", "numpy", "curvlinops-for-pytorch", "transformers", "safetensors")
END = "<!-- end -->"
HEADER = (
    "| way | first | each further | its time / ours | target | error | from ours | peak memory | plan said |",
    "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
)


@functools.cache
def versions() -> dict[str, str]:
    """Of everything that can move a number, as it was when first asked; of our own sources a fingerprint."""
    found = {"python": platform.python_version(), "sources": sources()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__
    return found


def sources() -> str:
    """Twelve digits of the sha256 over the library's and the benchmarks' Python files."""
    digest = hashlib.sha256()
    for folder in ("src/tangents", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def machine(device: str) -> dict[str, Any]:
    """The processor, what of it was used, and the GPU."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_GB": round(memory.total_bytes() / 1e9, 1),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_memory_GB"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    return found


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


# ---------------------------------------------------------------- JSON


def path(out: Path, job: str, device: str, size: str) -> Path:
    return out / f"{job}-{device}{'' if size == 'full' else '-' + size}.json"


def is_done(file: Path) -> bool:
    """Whether the job's JSON is there, from the versions that are installed now."""
    return file.exists() and json.loads(file.read_text())["versions"] == versions()


def write(file: Path, job: Any, device: str, size: str, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = {"job": job.name, "title": job.title, "device": device, "size": size}
    record = {**head, "versions": versions(), "machine": machine(device), **result}
    file.write_text(json.dumps(record, indent=1) + "\n")


# ---------------------------------------------------------------- Markdown


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def size_of(value: float | None, missing: str = "") -> str:
    if value is None:
        return missing
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def spread(ratios: list[float] | None) -> str:
    if ratios is None:
        return ""
    low, middle, high = ratios
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def verdict(met: bool | None, stretch: bool = False) -> str:
    return "not measured" if met is None else "met" if met else "missed (a stretch)" if stretch else "**missed**"


def time_target(target: dict[str, Any]) -> str:
    """A target in the words of the column "its time / ours": at least 4, or ours at most 1.3 times that way's time."""
    if target["at_least"]:
        return f"at least {target['at_least']:g}: {verdict(target['met'], target['stretch'])}"
    measured = "" if target["measured"] is None else f"{target['measured']:.3g}, "
    return f"ours / its time at most {target['at_most']:g}: {measured}{verdict(target['met'], target['stretch'])}"


def own_targets(record: dict[str, Any]) -> str:
    """Those of our own line: the answer, memory against the plan, and a limit of memory."""
    texts = []
    for target in record["targets"]:
        if target["what"] == "answer" and target["met"] is False:
            texts.append(f"**wrong answer** (error above {target['limit']:g})")
        if target["what"] == "plan":
            texts.append(f"peak within 15% of the plan: {verdict(target['met'])}")
        if target["what"] == "memory":
            texts.append(f"at most {size_of(target['limit'])}: {verdict(target['met'])}")
    return "; ".join(texts)


def peak(way: dict[str, Any]) -> str:
    if way["role"] == "bound":
        return "not measured"
    usual = way.get("peak_bytes_usual_malloc")
    return size_of(way.get("peak_bytes")) + (f" ({size_of(usual)} with malloc as it is)" if usual else "")


def job_table(record: dict[str, Any]) -> list[str]:
    """One job: its title, what it ran on, and a line a contestant."""
    facts = ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
                      for name, value in record["facts"].items())  # fmt: skip
    lines = [f"**{record['title']}** (`{record['job']}`; {facts})", "", *HEADER]
    main = next(name for name, way in record["contestants"].items() if way["role"] == "ours")
    for name, way in record["contestants"].items():
        if way["status"] != "ok":
            cells = [way["status"], "", "", ""]
        else:
            cells = [seconds(way.get("first_s")), seconds(way.get("median_s")), spread(way.get("times_ours"))]
            targets = [time_target(t) for t in record["targets"] if t.get("against") == name]
            cells += [own_targets(record) if name == main else "; ".join(targets)]
        cells += [number(way.get("error")), number(way.get("difference_from_ours"))]
        planned = size_of(way.get("planned_bytes"), "not stated" if way["role"] == "ours" else "")
        cells += [peak(way), planned]
        lines.append(f"| {f'**{name}**' if way['role'] == 'ours' else name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def table(out: Path, device: str, jobs: list[Any], size: str = "full") -> str:
    """All jobs of one device, with versions and machine; a job without a JSON is named as not measured."""
    lines, last = [], None
    for job in jobs:
        file = path(out, job.name, device, size)
        if not file.exists():
            lines += [f"**{job.title}** (`{job.name}`): not measured", ""]
            continue
        record = json.loads(file.read_text())
        setting = (record["machine"], record["versions"])
        if setting != last:
            lines += [", ".join(f"{name} {value}" for part in setting for name, value in part.items()) + ".", ""]
            last = setting
        lines += job_table(record)
    return "\n".join(lines)


def update_page(out: Path, jobs: list[Any], page: Path = PAGE) -> None:
    """Writes the tables of both devices between their markers."""
    text = page.read_text()
    for device in ("cpu", "cuda"):
        start = f"<!-- table:{device} -->"
        if start not in text or END not in text.split(start, 1)[1]:
            raise ValueError(f"{page} has no line {start} with {END} after it: put them where the table belongs")
        before, rest = text.split(start, 1)
        after = rest.split(END, 1)[1]
        text = f"{before}{start}\n\n{table(out, device, jobs)}\n{END}{after}"
    page.write_text(text)
