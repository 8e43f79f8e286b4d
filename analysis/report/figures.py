"""What all figures share: colors, style, axes and how they are saved. matplotlib is loaded only to draw."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Distinct for every kind of color vision (Okabe and Ito)."""
GREY = "#999999"
STYLE: Any = {
    "svg.hashsalt": "coadapt",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw and save figures inside this context."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1
) -> tuple["Figure", list["Axes"]]:
    """A figure of this size in inches, and its panels row by row. Panels of one column share their axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    shared = columns == 1
    panels = figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
    return figure, list(panels.flat)


def colors_of(names: Sequence[str]) -> dict[str, str]:
    return {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)}


def set_log_ticks(
    axis: "Axis", low: float, high: float, factors: Sequence[float], min_distance: float = 0.0
) -> None:
    """Put ticks that read as plain numbers on a logarithmic axis from `low` to `high`: each factor times each
    power of ten. Where ticks would come closer than `min_distance`, as a fraction of the length of the axis,
    the earlier factor wins."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    closest = (high / low) ** min_distance
    ticks: list[float] = []
    for tick in (factor * 10.0**power for factor in factors for power in powers):
        if low <= tick <= high and all(max(tick / other, other / tick) >= closest for other in ticks):
            ticks.append(tick)
    ticks.sort()
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def save_svg(figure: "Figure", path: Path, **layout: Any) -> None:
    """The same figure gives the same bytes. Raises OSError."""
    figure.savefig(path, metadata={"Date": None}, **layout)
