"""Figures, drawn with matplotlib without touching its global state. Importing this file needs the `plot` extra."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array = NDArray[np.floating]

INK, GREY, BLUE, ORANGE = "#222222", "#9a9a9a", "#1f5fa8", "#d9622b"


def adaptation(
    x: Array,
    K: Array,
    noise: float,
    x_seen: Array,
    y_seen: Array,
    before: Array,
    truth: Array,
    mean: Array,
    std: Array,
) -> Figure:
    """One slide: the kernel over sorted inputs, its spectrum, and a fit from few points with its band.

    `x` is sorted and one-dimensional, `K` its kernel, `noise` the variance below which an eigenvalue of `K` is not
    learnt; `before`, `truth`, `mean` and `std` are values at `x`.
    """
    figure = Figure(figsize=(15, 4.5), dpi=160, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.05, 1, 1.5])
    kernel_heat_map(left, x, K)
    spectrum(middle, K, noise)
    fit_with_band(right, x, mean, std)
    right.plot(x, truth, color=INK, linestyle="--", linewidth=1.4, label="new task")
    right.plot(x, before, color=GREY, linewidth=1.6, label="network as trained")
    right.scatter(x_seen, y_seen, color=ORANGE, edgecolor="white", s=48, zorder=4, label=f"{len(x_seen)} labels")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, fontsize=9, columnspacing=1.2)
    right.set_title("Adapted by one linear solve")
    return figure


def kernel_heat_map(axes: Axes, x: Array, K: Array) -> None:
    """`K` as an image over its sorted inputs."""
    low, high = float(x[0]), float(x[-1])
    image = axes.imshow(K, cmap="magma", extent=(low, high, high, low), interpolation="nearest")
    axes.set(title="Kernel of the trained network", xlabel="input", ylabel="input")
    figure = axes.get_figure()
    if figure is not None:
        figure.colorbar(image, ax=axes, shrink=0.8)


def spectrum(axes: Axes, K: Array, noise: float) -> None:
    """The eigenvalues of `K` in descending order on a log scale, and the level of the noise."""
    eigenvalues = np.linalg.eigvalsh(K)[::-1]
    floor = 1e-15 * float(eigenvalues[0])  # rounding: what lies below is no eigenvalue
    shown = eigenvalues[eigenvalues > floor]
    learnt = int((eigenvalues > noise).sum())
    axes.semilogy(range(1, len(shown) + 1), shown, color=BLUE, marker="o", markersize=3, linewidth=1)
    axes.axhline(noise, color=ORANGE, linestyle="--", linewidth=1.4)
    axes.annotate(
        f"noise:\n{learnt} of {len(K)} above",
        (0, noise),
        xycoords=("axes fraction", "data"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=ORANGE,
    )
    axes.set(title="Its spectrum", xlabel="eigenvalue's rank", ylabel="eigenvalue")
    _without_frame(axes)


def fit_with_band(axes: Axes, x: Array, mean: Array, std: Array) -> None:
    """A predictive mean and the band of two standard deviations around it."""
    axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.18, linewidth=0, label="2 std")
    axes.plot(x, mean, color=BLUE, linewidth=2.2, label="adapted")
    axes.set(xlabel="input", ylabel="output")
    axes.margins(x=0.01)
    _without_frame(axes)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure, making its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _without_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
