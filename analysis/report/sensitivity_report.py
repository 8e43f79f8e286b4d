"""A sensitivity study for people: Markdown, and one figure per sweep."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from analysis.compare.sensitivity_study import Cell, RatioSpread, Study, SweepTable
from analysis.report.figures import (
    COLORS,
    GREY,
    colors_of,
    figure_style,
    new_figure,
    save_svg,
    set_log_ticks,
)
from analysis.report.tables import Table, to_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 4.0
"""An axis is logarithmic if its ends differ by more than this factor."""
TICK_FACTORS = (1, 2, 5)


def markdown(found: Study) -> str:
    lines = [
        f"# Sensitivity in the world `{found.world}`\n",
        f"Workloads {', '.join(found.workloads)}; seeds {', '.join(map(str, found.seeds))}. Mean completion "
        f"times: of `{found.baseline}` in seconds; of the other policies as a ratio to `{found.baseline}` at "
        "the same point, the geometric mean over workloads and seeds with its range in brackets. Where "
        "something was varied, a second ratio follows: to the same policy at the default point, in bold.\n",
    ]
    for name, table in found.sweeps.items():
        lines += [f"## {name}: {table.title}\n", to_markdown(_sweep_table(found, name, table)), ""]
    if found.left_out:
        lines += ["## Left out\n", *(f"* {what}: {why}" for what, why in found.left_out.items()), ""]
    return "\n".join(lines)


def _sweep_table(found: Study, name: str, sweep: SweepTable) -> Table:
    policies = list(next(iter(sweep.points.values())))
    varied = len(sweep.points) > 1
    rows = [
        [
            f"**{point}**" if point == sweep.default else point,
            *(
                _cell(cells[policy], is_baseline=policy == found.baseline, varied=varied)
                for policy in policies
            ),
        ]
        for point, cells in sweep.points.items()
    ]
    return Table("", [name, *policies], rows)


def _cell(cell: Cell, *, is_baseline: bool, varied: bool) -> str:
    ratio = cell.over_baseline
    if cell.mean_jct_s is None or ratio is None:
        return "-"
    text = f"{cell.mean_jct_s:.1f} s" if is_baseline else f"{ratio.mean:.3f}"
    if not is_baseline and ratio.runs > 1:
        text += f" ({ratio.least:.2f}-{ratio.most:.2f})"
    return f"{text}; {cell.over_default.mean:.3f}" if varied and cell.over_default else text


# --------------------------------------------------------------------------- figures


def figures(found: Study, folder: Path) -> list[Path]:
    """Draw one SVG per sweep; returns their paths. Raises OSError."""
    paths = []
    for name, sweep in found.sweeps.items():
        path = folder / f"sensitivity-{found.world}-{name}.svg"
        with figure_style():
            save_svg(_bars(found, sweep) if len(sweep.points) == 1 else _lines(found, sweep), path)
        paths.append(path)
    return paths


def _bars(found: Study, sweep: SweepTable) -> "Figure":
    (cells,) = sweep.points.values()
    figure, (axes,) = new_figure(6.0, 0.35 * len(cells) + 0.9)
    for policy, cell in reversed(cells.items()):
        if ratio := cell.over_baseline:
            axes.barh(policy, ratio.mean, xerr=_error_bars([ratio]), height=0.6, color=COLORS[0], capsize=3)
    axes.set_xlabel(f"mean completion time over that of {found.baseline}; lines: range over all runs")
    axes.set_title(f"{sweep.title} ({found.world})")
    return figure


def _lines(found: Study, sweep: SweepTable) -> "Figure":
    """Left: ratios to the baseline at the same point. Right: ratios to the policy's own default."""
    figure, (left, right) = new_figure(9.0, 3.4, columns=2)
    _plot_ratios(left, sweep, "over_baseline")
    left.set_title(f"mean completion time over that of {found.baseline}")
    _plot_ratios(right, sweep, "over_default")
    right.set_title(f"mean completion time over the policy's own at: {sweep.default}")
    label = f"{sweep.title} ({found.world}); bars: range over workloads and seeds"
    figure.supxlabel(label, fontsize="medium")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def _plot_ratios(axes: "Axes", sweep: SweepTable, which: Literal["over_baseline", "over_default"]) -> None:
    policies = list(next(iter(sweep.points.values())))
    for number, (policy, color) in enumerate(colors_of(policies).items()):
        offset = 0.04 * (number - len(policies) / 2)  # so that the error bars of policies do not overlap
        known = [
            (place + offset, ratio, _is_number(point))
            for place, (point, cells) in enumerate(sweep.points.items())
            if (ratio := _ratio(cells[policy], which)) is not None
        ]
        if not known:
            continue
        x, ratios, numeric = zip(*known, strict=True)
        means = [ratio.mean for ratio in ratios]
        # A point that is no number has no place between numbers, so no line leads to it.
        joined = [mean if is_numeric else math.nan for mean, is_numeric in zip(means, numeric, strict=True)]
        axes.plot(x, joined, color=color, linewidth=1.2)
        axes.plot(x, means, "o", color=color, label=policy, markersize=3)
        axes.errorbar(x, means, yerr=_error_bars(ratios), fmt="none", ecolor=color, elinewidth=0.6)
    axes.axhline(1.0, color=GREY, linewidth=0.6, zorder=0)
    lowest, highest = axes.get_ylim()
    if lowest > 0 and highest / lowest > WIDE:
        axes.set_yscale("log")
        set_log_ticks(axes.yaxis, lowest, highest, TICK_FACTORS)
    axes.set_xticks(range(len(sweep.points)), [point.replace(" ", "\n") for point in sweep.points])


def _ratio(cell: Cell, which: Literal["over_baseline", "over_default"]) -> RatioSpread | None:
    return cell.over_baseline if which == "over_baseline" else cell.over_default


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def _error_bars(ratios: Sequence[RatioSpread]) -> list[list[float]]:
    """Distances from the mean to the ends of the range."""
    return [[ratio.mean - ratio.least for ratio in ratios], [ratio.most - ratio.mean for ratio in ratios]]
