"""Tables and figures of a sensitivity study: what completion times do when one thing is varied.

Two ratios of mean completion times, each taken workload by workload and seed by seed, then summed up: to the
baseline policy at the same point, and to the same policy at the point where all is as by default.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from analysis.report.figures import COLOURS, GREY, STYLE
from common.types import Struct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 4.0
"""An axis whose ends are further apart than by this factor is logarithmic."""
LOG_TICKS = [factor * 10.0**power for power in range(-3, 5) for factor in (1, 2, 5)]


class SweepOutcome(Struct, frozen=True):
    """One run. `mean_jct_s` is None where not every one of its jobs completed, `why` then says more."""

    sweep: str
    point: str
    policy: str
    workload: str
    seed: int
    mean_jct_s: float | None
    why: str = ""


class Axis(Struct, frozen=True):
    """A sweep: its points and policies in their order; `default` is one of the points."""

    name: str
    title: str
    points: tuple[str, ...]
    default: str
    policies: tuple[str, ...]


class RatioSpread(Struct, frozen=True):
    """The geometric mean of ratios over workloads and seeds, the least and the largest of them."""

    mean: float
    least: float
    most: float
    runs: int


class Cell(Struct, frozen=True):
    """None: no run to compare with on both sides."""

    mean_jct_s: float | None
    over_baseline: RatioSpread | None
    over_default: RatioSpread | None


class SweepTable(Struct, frozen=True):
    title: str
    default: str
    points: dict[str, dict[str, Cell]]
    """By point and policy."""


class Study(Struct, frozen=True):
    """What `sensitivity-<world>.json` holds."""

    world: str
    version: str
    baseline: str
    workloads: tuple[str, ...]
    seeds: tuple[int, ...]
    sweeps: dict[str, SweepTable]
    left_out: dict[str, str]
    """Sweeps, and runs without a figure: why."""


def study(
    world: str,
    version: str,
    baseline: str,
    axes: Sequence[Axis],
    outcomes: Sequence[SweepOutcome],
    left_out: Mapping[str, str],
) -> Study:
    times_s: dict[tuple[str, str, str], dict[tuple[str, int], float]] = {}
    missing = dict(left_out)
    for run in outcomes:
        of_cell = times_s.setdefault((run.sweep, run.point, run.policy), {})
        if run.mean_jct_s is None:
            name = f"{run.sweep} {run.point}, {run.policy} on {run.workload}, seed {run.seed}"
            missing[name] = run.why
        else:
            of_cell[run.workload, run.seed] = run.mean_jct_s

    def cell(sweep: str, point: str, policy: str, default: str) -> Cell:
        own = times_s.get((sweep, point, policy), {})
        return Cell(
            mean_jct_s=statistics.fmean(own.values()) if own else None,
            over_baseline=_spread(own, times_s.get((sweep, point, baseline), {})),
            over_default=_spread(own, times_s.get((sweep, default, policy), {})),
        )

    tables = {
        axis.name: SweepTable(
            title=axis.title,
            default=axis.default,
            points={
                point: {policy: cell(axis.name, point, policy, axis.default) for policy in axis.policies}
                for point in axis.points
            },
        )
        for axis in axes
    }
    return Study(
        world=world,
        version=version,
        baseline=baseline,
        workloads=tuple(dict.fromkeys(run.workload for run in outcomes)),
        seeds=tuple(sorted({run.seed for run in outcomes})),
        sweeps=tables,
        left_out=missing,
    )


def _spread(own: Mapping[Any, float], other: Mapping[Any, float]) -> RatioSpread | None:
    ratios = [own[key] / other[key] for key in own if other.get(key, 0.0) > 0]
    if not ratios:
        return None
    return RatioSpread(statistics.geometric_mean(ratios), min(ratios), max(ratios), len(ratios))


def encoded(found: Study) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def markdown(found: Study) -> str:
    lines = [
        f"# Sensitivity in the world `{found.world}`\n",
        f"Workloads {', '.join(found.workloads)}; seeds {', '.join(map(str, found.seeds))}. Mean completion "
        f"time: of `{found.baseline}` in seconds, of the others over that of `{found.baseline}` at the same "
        "point, the geometric mean over workloads and seeds, in brackets the least and the most of them; "
        "behind it, where something was varied, over the same policy's own at the point in bold, where all "
        "is as by default.\n",
    ]
    for name, table in found.sweeps.items():
        policies = list(next(iter(table.points.values())))
        lines += [f"## {name}: {table.title}\n", _row([name, *policies])]
        lines.append(_row(["---", *["---:"] * len(policies)]))
        for point, cells in table.points.items():
            label = f"**{point}**" if point == table.default else point
            alone = len(table.points) == 1
            texts = (_cell(cells[policy], policy == found.baseline, alone) for policy in policies)
            lines.append(_row([label, *texts]))
        lines.append("")
    if found.left_out:
        lines += ["## Left out\n", *(f"* {what}: {why}" for what, why in found.left_out.items()), ""]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, baseline: bool, alone: bool) -> str:
    ratio = cell.over_baseline
    if cell.mean_jct_s is None or ratio is None:
        return "-"
    text = f"{ratio.mean:.3f} ({ratio.least:.2f}-{ratio.most:.2f})" if ratio.runs > 1 else f"{ratio.mean:.3f}"
    text = f"{cell.mean_jct_s:.1f} s" if baseline else text
    return text if alone or cell.over_default is None else f"{text}; {cell.over_default.mean:.3f}"


# --------------------------------------------------------------------------- figures


def figures(found: Study, folder: Path) -> list[Path]:
    """One SVG a sweep; the same study gives the same bytes. Returns their paths. Raises OSError."""
    import matplotlib

    paths = []
    for name, table in found.sweeps.items():
        path = folder / f"sensitivity-{found.world}-{name}.svg"
        with matplotlib.rc_context(STYLE):
            drawing = _bars(found, table) if len(table.points) == 1 else _lines(found, table)
            drawing.savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def _bars(found: Study, table: SweepTable) -> "Figure":
    from matplotlib.figure import Figure

    (cells,) = table.points.values()
    drawing = Figure(figsize=(6.0, 0.35 * len(cells) + 0.9), layout="constrained")
    axes = drawing.subplots()
    for policy, cell in reversed(cells.items()):
        if ratio := cell.over_baseline:
            axes.barh(policy, ratio.mean, xerr=_error([ratio]), height=0.6, color=COLOURS[0], capsize=3)
    axes.set_xlabel(f"mean completion time over that of {found.baseline}; lines: least and most of all runs")
    axes.set_title(f"{table.title} ({found.world})")
    return drawing


def _lines(found: Study, table: SweepTable) -> "Figure":
    """Left: over the baseline at the same point. Right: over the policy's own default."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9.0, 3.4), layout="constrained")
    policies = list(next(iter(table.points.values())))
    titles = {
        "over_baseline": f"mean completion time over that of {found.baseline}",
        "over_default": f"mean completion time over the policy's own at: {table.default}",
    }
    for axes, (relative, title) in zip(drawing.subplots(1, 2), titles.items(), strict=True):
        for number, policy in enumerate(policies):
            known = [
                (at + 0.04 * (number - len(policies) / 2), ratio, _is_number(point))
                for at, (point, cells) in enumerate(table.points.items())
                if (ratio := getattr(cells[policy], relative)) is not None
            ]
            if known:
                x, ratios, numbers = zip(*known, strict=True)
                means, colour = [ratio.mean for ratio in ratios], COLOURS[number % len(COLOURS)]
                # What is no number has no place between numbers: no line goes there.
                joined = [mean if number else math.nan for mean, number in zip(means, numbers, strict=True)]
                axes.plot(x, joined, color=colour, linewidth=1.2)
                axes.plot(x, means, "o", color=colour, label=policy, markersize=3)
                axes.errorbar(x, means, yerr=_error(ratios), fmt="none", ecolor=colour, elinewidth=0.6)
        axes.axhline(1.0, color=GREY, linewidth=0.6, zorder=0)
        lowest, highest = axes.get_ylim()
        if lowest > 0 and highest / lowest > WIDE:
            axes.set_yscale("log")
            ticks = [tick for tick in LOG_TICKS if lowest <= tick <= highest]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_yticks([], minor=True)
        axes.set_xticks(range(len(table.points)), [point.replace(" ", "\n") for point in table.points])
        axes.set_title(title)
    label = f"{table.title} ({found.world}); bars: least and most over workloads and seeds"
    drawing.supxlabel(label, fontsize=STYLE["font.size"])
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return drawing


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def _error(ratios: Sequence[RatioSpread]) -> list[list[float]]:
    below = [math.fabs(ratio.mean - ratio.least) for ratio in ratios]
    return [below, [math.fabs(ratio.most - ratio.mean) for ratio in ratios]]
