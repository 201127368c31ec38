"""The command line: `tangents demo`, `tangents --version`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tangents import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Linearised neural networks for PyTorch.")
console = Console()


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"tangents {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Hold the options that come before a command."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder that the figure goes into; made if it is not there.")] = Path(
        "out/demo"
    ),
) -> None:
    """Train a small network, linearise it, adapt it to a new task from ten points, and draw what happened."""
    from tangents.cli.demo import MissingExtra, run

    try:
        run(out, console)
    except (MissingExtra, OSError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(code=1) from error
