"""`python -m benchmarks`: runs the jobs whose results are not there yet, one JSON each, and prints them as a table.

Interrupted or given only some names, it goes on where it stopped: a job with a JSON from the same versions is skipped.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from benchmarks import fisher_products, harness, jacobian_products, kernel_dense, kernel_diagonal, memory, report

JOBS = [*jacobian_products.JOBS, *kernel_dense.JOBS, *kernel_diagonal.JOBS, *fisher_products.JOBS]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs, by name or its beginning")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("TANGENTS_DATA"), help="the data folder")
    parser.add_argument("--out", type=Path, default=report.ROOT / "benchmarks" / "results")
    parser.add_argument("--force", action="store_true", help="run what has its result already, too")
    parser.add_argument("--no-memory", action="store_true", help="leave out the measurement of memory")
    parser.add_argument("--table", action="store_true", help="run nothing; write the tables of docs/benchmarks.md")
    parser.add_argument("--size", choices=("full", "quick", "tiny"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, metavar=("JOB", "WAY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.size = given.size or ("quick" if given.quick else "full")
    given.data = Path(given.data).resolve() if given.data else None
    return given


def chosen(names: list[str] | None) -> list[harness.Job]:
    """The jobs whose names begin with one of the given ones."""
    unknown = [name for name in names or [] if not any(job.name.startswith(name) for job in JOBS)]
    if unknown:
        sys.exit(f"no job named {', '.join(unknown)}; there are {', '.join(job.name for job in JOBS)}")
    return [job for job in JOBS if names is None or any(job.name.startswith(name) for name in names)]


def measure_one(job_name: str, way: str, settings: harness.Settings) -> None:
    """In a process of its own (see memory.py): the peak of one contestant, printed as JSON."""
    job = next(job for job in JOBS if job.name == job_name)
    harness.warm_up(job, settings, only=way)
    case = job.build(settings)
    contestant = next(c for c in case.contestants if c.name == way)
    print(memory.ANSWER + json.dumps(harness.measure_here(contestant, settings.device)), flush=True)


def main() -> None:
    given = arguments()
    settings = harness.Settings(given.device, given.size, given.data)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # float32 is float32, for all
    if given.measure:
        measure_one(*given.measure, settings)
    elif given.table:
        report.update_page(given.out, JOBS)
    else:
        run(chosen(given.only), settings, given)


def run(jobs: list[harness.Job], settings: harness.Settings, given: argparse.Namespace) -> None:
    """The jobs one after the other; each leaves its JSON when it is done."""
    report.versions()  # of the sources that run, not of what they are when a job ends
    for job in jobs:
        file = report.path(given.out, job.name, given.device, given.size)
        why_not = job.missing(settings)
        if why_not:
            print(f"skipped: {why_not}")
        elif report.is_done(file) and not given.force:
            print(f"skipped: {job.name} is done ({file.name}; --force runs it again)")
        else:
            print(f"{job.name}: {job.title}", flush=True)
            result = harness.run(job, settings, lambda line: print(line, flush=True), not given.no_memory)
            report.write(file, job, given.device, given.size, result)
    print("\n" + report.table(given.out, given.device, jobs, given.size))


if __name__ == "__main__":
    main()
