"""Runs contestants beside each other, and says how fast, how right and how large each of them was.

A *job* is one claim (one network, one size, one product). It builds a *case*: our way, the peers' ways and the
targets. All contestants of a case run in one process in interleaved rounds (A B C, A B C, ...), so that whatever else
the machine does meets all of them; the ratio of two contestants is taken round by round, and its median and quartiles
are reported.
"""

import contextlib
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import memory

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Settings:
    """Where and how large: `size` is "full" (the claim), "quick" (a trial of seconds) or "tiny" (a warm-up)."""

    device: str = "cpu"
    size: str = "full"
    data: Path | None = None

    def pick(self, full: int, quick: int, tiny: int) -> int:
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]

    def on(self, cpu: int, cuda: int) -> int:
        """What a peer is fastest with on each (the inputs that are batched at a time)."""
        return cuda if self.device == "cuda" else cpu


@dataclass
class Contestant:
    """One way to the answer. `start` does what is done once and returns the call that is repeated.

    The first contestant of a case whose role is "ours" is the one that peers and bounds are held against. A "bound" is
    the least that any such way must do (a bare matrix product); its memory is not measured. `units` divides the times
    (columns of a product). `answers=False`: what it returns is not the answer, so it is not compared.
    """

    name: str
    start: Callable[[], Call]
    role: str = "peer"
    units: int = 1
    answers: bool = True
    needs_bytes: int = 0  # refused, not tried, where the machine has less free
    package: str | None = None  # not run where this is not installed
    planned: Callable[[], int | None] = lambda: None  # the peak that our plan stated


@dataclass(frozen=True)
class Target:
    """`at_least`: times as fast as the other; `at_most`: times the other's time. A stretch may be missed."""

    against: str
    at_least: float | None = None
    at_most: float | None = None
    stretch: bool = False


@dataclass
class Case:
    """What a job built. `reference` gives the answer in float64, or of it what `part` cuts out of an answer."""

    contestants: list[Contestant]
    targets: list[Target] = field(default_factory=list)
    reference: Call | None = None
    part: Callable[[Tensor], Tensor] = lambda answer: answer
    tolerance: float = 1e-3
    memory_limit: int | None = None  # a target in bytes for our own peak
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> str:
        return next(c.name for c in self.contestants if c.role == "ours")


@dataclass(frozen=True)
class Job:
    """One claim. `files` are what it reads of the data folder; `rounds` and `budget_s` bound how long it is timed."""

    name: str
    title: str
    build: Callable[[Settings], Case]
    files: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    also: Callable[[Settings], str | None] = lambda settings: None  # what else is missing
    rounds: int = 15
    budget_s: float = 150.0

    def missing(self, settings: Settings) -> str | None:
        """What keeps this job from running, as a sentence, or None."""
        if self.files and settings.data is None:
            return f"{self.name} needs a data folder: --data DIR or TANGENTS_DATA"
        for file in self.files:
            if not (settings.data / file).exists():
                return f"{self.name} needs {file} in the data folder"
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"{self.name} needs the package {package}"
        return self.also(settings)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds that one call took, the device's work included, and what it returned."""
    synchronise(device)
    start = time.perf_counter()
    answer = call()
    synchronise(device)
    return time.perf_counter() - start, answer


def relative_error(answer: Tensor, truth: Tensor) -> float:
    """|answer - truth| / |truth|, Frobenius, in float64. Not a number stays not a number."""
    answer, truth = answer.detach().cpu().double().reshape(-1), truth.detach().cpu().double().reshape(-1)
    return float((answer - truth).norm() / truth.norm())


def why_failed(error: BaseException) -> str:
    """One line for the table: a contestant that ran out of memory or refused is a result, not a crash."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    exhausted = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    return "out of memory" if exhausted else f"failed: {type(error).__name__}: {text}"[:200]


def why_refused(contestant: Contestant, device: str) -> str | None:
    if contestant.package and importlib.util.find_spec(contestant.package) is None:
        return f"not installed: {contestant.package}"
    if contestant.needs_bytes > memory.free_bytes(device):
        return f"refused: would need {contestant.needs_bytes / 1e9:.1f} GB"
    return None


def warm_up(job: Job, settings: Settings, only: str | None = None) -> None:
    """Every contestant once on a few inputs, so that loading libraries is in nobody's time and nobody's memory."""
    for contestant in job.build(Settings(settings.device, "tiny", settings.data)).contestants:
        if only in (None, contestant.name) and why_refused(contestant, settings.device) is None:
            with contextlib.suppress(Exception):  # the run itself reports it
                contestant.start()()
    synchronise(settings.device)
    gc.collect()


def run(job: Job, settings: Settings, say: Callable[[str], None], measure_memory: bool = True) -> dict[str, Any]:
    """The whole job: memory of each, first calls and agreement, then the rounds. Returns what the JSON holds."""
    warm_up(job, settings)
    case = job.build(settings)
    results: dict[str, dict[str, Any]] = {}
    for contestant in case.contestants:
        result: dict[str, Any] = {"role": contestant.role, "units": contestant.units, "status": "ok"}
        results[contestant.name] = result
        refusal = why_refused(contestant, settings.device)
        if refusal:
            result["status"] = refusal
        elif measure_memory and contestant.role != "bound":
            result.update(measure(job, settings, contestant))
        say(f"  {contestant.name}: {memory_line(result) if result['status'] == 'ok' else result['status']}")
    calls, answers = first_calls(case, results, settings.device, say)
    compare(case, results, answers)
    answers.clear()
    rounds = interleave(calls, results, settings.device, job.rounds, job.budget_s)
    calls.clear()
    summarise(case, results, rounds)
    return {"facts": case.facts, "contestants": results, "targets": judge(case, results)}


def first_calls(
    case: Case, results: dict[str, dict[str, Any]], device: str, say: Callable[[str], None]
) -> tuple[dict[str, Call], dict[str, Tensor]]:
    """Starts every contestant that can run and takes its first answer; `first_s` is the time of both."""
    calls, answers = {}, {}
    for contestant in case.contestants:
        result = results[contestant.name]
        if result["status"] != "ok":
            continue
        try:
            start_s, call = timed(contestant.start, device)
            first_s, answer = timed(call, device)
        except Exception as error:  # noqa: BLE001
            result["status"] = why_failed(error)
            say(f"  {contestant.name}: {result['status']}")
            continue
        result["first_s"] = (start_s + first_s) / contestant.units
        say(f"  {contestant.name}: first {result['first_s']:.4g} s")
        calls[contestant.name] = call
        if contestant.answers:
            answers[contestant.name] = answer.detach().cpu()
        del answer
    return calls, answers


def compare(case: Case, results: dict[str, dict[str, Any]], answers: dict[str, Tensor]) -> None:
    """How far every answer is from the float64 reference, and from ours."""
    truth = case.reference().cpu() if case.reference else None
    for name, answer in answers.items():
        if truth is not None:
            results[name]["error"] = relative_error(case.part(answer), truth)
        if name != case.ours and case.ours in answers:
            results[name]["difference_from_ours"] = relative_error(answer, answers[case.ours])


def interleave(
    calls: dict[str, Call], results: dict[str, dict[str, Any]], device: str, rounds: int, budget_s: float
) -> list[dict[str, float]]:
    """Rounds of one call each, in turn; at least three, then until `rounds` or the budget is reached."""
    times: list[dict[str, float]] = []
    began = time.perf_counter()
    while calls and len(times) < rounds and (len(times) < 3 or time.perf_counter() - began < budget_s):
        times.append({})
        for name, call in list(calls.items()):
            gc.collect()
            try:
                times[-1][name] = timed(call, device)[0] / results[name]["units"]
            except Exception as error:  # noqa: BLE001
                results[name]["status"] = why_failed(error)
                del calls[name]
    return times


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def summarise(case: Case, results: dict[str, dict[str, Any]], rounds: list[dict[str, float]]) -> None:
    """Median time of each, and the ratio to ours of each round: its quartiles (lower, median, upper)."""
    for name, result in results.items():
        if result["status"] != "ok":
            continue
        seconds = [times[name] for times in rounds if name in times]
        result.update(median_s=statistics.median(seconds), seconds=seconds)
        if name != case.ours and results[case.ours]["status"] == "ok":
            result["times_ours"] = quartiles([t[name] / t[case.ours] for t in rounds if name in t and case.ours in t])


def judge(case: Case, results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target with what was measured. A wrong answer meets none."""
    ours = results[case.ours]
    error = ours.get("error")
    wrong = error is not None and not error <= case.tolerance  # so that not-a-number is wrong too
    verdicts: list[dict[str, Any]] = [{"what": "answer", "limit": case.tolerance, "measured": error,
                                       "met": None if error is None else not wrong}]  # fmt: skip
    for target in case.targets:
        ratio = results[target.against].get("times_ours")
        measured = None if ratio is None else (ratio[1] if target.at_least else 1 / ratio[1])
        met = measured is not None and not wrong
        met = met and (measured >= target.at_least if target.at_least else measured <= target.at_most)
        verdicts.append({"what": "time", "against": target.against, "at_least": target.at_least,
                         "at_most": target.at_most, "stretch": target.stretch, "measured": measured,
                         "met": met if measured is not None else None})  # fmt: skip
    peak, planned = ours.get("peak_bytes"), ours.get("planned_bytes")
    ratio = peak / planned if peak is not None and planned else None
    verdicts.append({"what": "plan", "limit": 0.15, "measured": ratio,
                     "met": None if ratio is None else abs(ratio - 1) <= 0.15})  # fmt: skip
    if case.memory_limit:
        peak = ours.get("peak_bytes_usual_malloc") or peak  # what a user sees
        verdicts.append({"what": "memory", "limit": case.memory_limit, "measured": peak,
                         "met": None if peak is None else peak <= case.memory_limit})  # fmt: skip
    return verdicts


def measure(job: Job, settings: Settings, contestant: Contestant) -> dict[str, Any]:
    """Peak bytes of one contestant beyond what the network and its inputs already held, and what our plan had said.

    On a GPU the allocator counts them here; on a CPU a fresh process does (see memory.py).
    """
    if settings.device == "cuda":
        return measure_here(contestant, settings.device)
    result = memory.in_fresh_process(job.name, contestant.name, settings)
    if contestant.role == "ours" and "peak_bytes" in result:
        usual = memory.in_fresh_process(job.name, contestant.name, settings, give_back=False)
        result["peak_bytes_usual_malloc"] = usual.get("peak_bytes")
    return result


def measure_here(contestant: Contestant, device: str) -> dict[str, Any]:
    """The same, in this process: what the fresh process runs after its warm-up. The call is made twice."""
    try:
        with memory.Peak(device) as peak:
            call = contestant.start()
            call()
            call()
            synchronise(device)
    except Exception as error:  # noqa: BLE001
        return {"status": why_failed(error)}
    result = {"peak_bytes": peak.bytes, "memory_method": peak.method}
    del call
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    planned = contestant.planned()
    return result if planned is None else {**result, "planned_bytes": planned}


def memory_line(result: dict[str, Any]) -> str:
    if "peak_bytes" not in result:
        return "memory not measured"
    planned = f", planned {result['planned_bytes'] / 1e6:.1f} MB" if "planned_bytes" in result else ""
    return f"peak {result['peak_bytes'] / 1e6:.1f} MB{planned}"
