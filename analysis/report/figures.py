"""Figures of a comparison, as SVG with the same bytes for the same runs; matplotlib is only loaded to draw.

Beside each figure lies a JSON file that names the runs it is made of, and the logs by their digest.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.compare.comparison import MEASURES, Comparison, Contrast
from analysis.compare.experiment_runs import Experiment
from analysis.compare.intervals import ENOUGH_PAIRS
from analysis.compare.pairing import ComparedRun
from analysis.log.frames import read
from analysis.log.history import JobHistory, RunHistory, history
from common.eventlog import EVENTS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Told apart by people of any colour vision (Okabe and Ito)."""
GREY = "#999999"
STYLE: Any = {
    "svg.hashsalt": "coadapt",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
}
TICKS = (1.0, 2.0, 5.0, 1.5, 3.0, 7.0, 8.0, 6.0, 1.2)
"""Within a decade, the first ones first where there is not room for all."""
MIN_TICK_DISTANCE = 0.045
"""Of the length of the axis."""
PARTS = 60
"""Into how many intervals the time axis of goodput is divided."""
MAX_NAMED_JOBS = 40
JCT = MEASURES[0]


def write_all(experiment: Experiment, comparison: Comparison, out: Path, suffix: str = ".svg") -> list[Path]:
    """Draw what the comparison has the runs for; returns the paths of the figures. Raises OSError."""
    written = []

    def write(name: str, draw: Callable[[], "Figure"], runs: Sequence[ComparedRun], shows: str) -> None:
        written.append(save(draw(), out / f"{name}{suffix}", [experiment.log(run) for run in runs], shows))

    import matplotlib

    with matplotlib.rc_context(STYLE):
        paired = [run for contrast in comparison.shown() for pair in contrast.pairs for run in pair]
        write(
            "mean-jct-ratio",
            lambda: ratios(comparison),
            list(dict.fromkeys(paired)),
            "mean JCT ratio of each two policies, by set and overall, with 95% intervals",
        )
        if comparison.common:
            shows = "job completion times of all jobs, by policy"
            write("jct", lambda: completion_times(comparison), comparison.common, shows)
            if any(job.rho is not None for run in comparison.common for job in run.summary.per_job):
                shows = "finish-time fairness rho of all jobs, by policy"
                write("rho", lambda: rhos(comparison), comparison.common, shows)
        if pair := median_pair(comparison):
            block = [run for run in comparison.runs if (run.set, run.seed) == (pair[0].set, pair[0].seed)]
            histories = {run.policy: history(read(experiment.log(run))) for run in block}
            label = f"{pair[0].set}, seed {pair[0].seed}"
            both = {run.policy: histories[run.policy] for run in pair}
            shows = f"slots of each job over time, {label}: the pair of median mean JCT ratio"
            write("timeline", lambda: timeline(both, label), pair, shows)
            block.sort(key=lambda run: comparison.policies.index(run.policy))
            ordered = {run.policy: histories[run.policy] for run in block}
            shows = f"realised goodput over time, by policy, {label}"
            write("goodput", lambda: goodput_over_time(ordered, label), block, shows)
    return written


def save(figure: "Figure", path: Path, logs: Iterable[Path], shows: str) -> Path:
    """Write a figure, and beside it the logs that it is made of. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=stamp, dpi=120, bbox_inches="tight")
    made_of = [_trace(log) for log in logs]
    beside = {"figure": path.name, "shows": shows, "runs": made_of}
    path.with_suffix(".json").write_text(json.dumps(beside, indent=2) + "\n", encoding="utf-8")
    return path


@cache
def _trace(log: Path) -> dict[str, str | int]:
    content = log.read_bytes()
    return {
        "run": log.parent.name,
        "log": EVENTS_FILE,
        "events": content.count(b"\n"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def headline(comparison: Comparison) -> Contrast | None:
    """What the project is about, where it was run."""
    shown = comparison.shown()
    return comparison.contrast("pollux", "fixed") or (shown[0] if shown else None)


def median_pair(comparison: Comparison) -> tuple[ComparedRun, ComparedRun] | None:
    """The pair in the middle by its mean JCT ratio, of the headline's."""
    contrast = headline(comparison)
    if not contrast or not contrast.pairs:
        return None

    def ratio(pair: tuple[ComparedRun, ComparedRun]) -> float:
        run, other = (JCT.of(one) or 0.0 for one in pair)
        return run / other if other else 0.0

    ordered = sorted(contrast.pairs, key=ratio)
    return ordered[(len(ordered) - 1) // 2]


def _figure(width: float, height: float, panels: int = 1) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, sharey=True, squeeze=False)
    return figure, list(axes[:, 0])


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _log_axis(axes: "Axes", low: float, high: float) -> None:
    """From `low` to `high`, with ticks that read as plain numbers."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    apart = (high / low) ** MIN_TICK_DISTANCE
    ticks: list[float] = []
    for tick in (factor * decade for factor in TICKS for decade in decades):
        if low <= tick <= high and all(max(tick / other, other / tick) >= apart for other in ticks):
            ticks.append(tick)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


# --------------------------------------------------------------------------- of all runs


def ratios(comparison: Comparison) -> "Figure":
    """A row for each two policies: the overall ratio, thin by sets, and below it that of each set."""
    shown = [contrast for contrast in comparison.shown() if contrast.pairs]
    sets = comparison.sets if len(comparison.sets) > 1 else ()
    colours, spread = _colours(sets), 0.75 / (len(sets) + 1)
    figure, (axes,) = _figure(7.0, 0.9 + len(shown) * (0.3 + 0.11 * len(sets)))
    values = [1.0]
    for row, contrast in enumerate(shown):
        points = [("overall", contrast.overall, "black", "D", 6.0)]
        points += [(name, contrast.by_set.get(name, {}), colours[name], "o", 4.0) for name in sets]
        for number, (name, effects, colour, marker, size) in enumerate(points):
            effect = effects.get(JCT.name)
            if effect is None or effect.value is None:
                continue
            y = row - 0.375 + (number + 0.5) * spread
            bounds = (effect.low or effect.value, effect.high or effect.value)
            axes.plot(bounds, (y, y), color=colour, linewidth=1.5, solid_capstyle="butt")
            if effect.low_by_set is not None and effect.high_by_set is not None:
                wider = (effect.low_by_set, effect.high_by_set)
                axes.plot(wider, (y, y), color=colour, linewidth=0.5)
                values += wider
            label = name if row == 0 else None
            axes.plot(effect.value, y, marker, color=colour, markersize=size, linestyle="none", label=label)
            values += bounds
        axes.axhline(row + 0.5, color="#EEEEEE", linewidth=0.8, zorder=0)
    _log_axis(axes, min(values) / 1.15, max(values) * 1.15)
    axes.axvline(1.0, color=GREY, linewidth=1, zorder=0)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks(range(len(shown)), [contrast.name for contrast in shown])
    label = (
        "mean JCT ratio (below 1: the policy named first is faster)\n"
        f"bars: 95% over the pairs, of fewer than {ENOUGH_PAIRS} their whole range"
    )
    axes.set_xlabel(f"{label}; thin: 95% by sets" if sets else label)
    if sets:
        figure.legend(loc="outside upper center", ncols=5, frameon=False)
    return figure


def completion_times(comparison: Comparison) -> "Figure":
    """ECDFs; each is named at a height of its own."""
    from matplotlib.patheffects import withStroke

    figure, (axes,) = _figure(7.0, 4.0)
    colours = _colours(comparison.policies)
    everything_s: list[float] = []
    for number, policy in enumerate(comparison.policies):
        times_s = np.sort(
            [
                job.jct_s
                for run in comparison.common
                if run.policy == policy
                for job in run.summary.per_job
                if job.jct_s is not None
            ]
        )
        everything_s += [float(times_s[0]), float(times_s[-1])]
        parts = np.arange(1, len(times_s) + 1) / len(times_s)
        axes.ecdf(times_s, color=colours[policy], linewidth=1.5)
        height = 0.12 + 0.76 * number / max(len(comparison.policies) - 1, 1)
        at_s = times_s[min(int(np.searchsorted(parts, height)), len(times_s) - 1)]
        axes.plot(at_s, height, "o", color=colours[policy], markersize=4)
        axes.annotate(
            f"{policy} (mean {times_s.mean():.1f} s)",
            (at_s, height),
            xytext=(5, 0),
            textcoords="offset points",
            color=colours[policy],
            va="center",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
    axes.set_ylim(0, 1.01)
    _log_axis(axes, min(everything_s) / 1.1, max(everything_s) * 1.1)
    axes.set_xlabel("job completion time, s")
    axes.set_ylabel("fraction of jobs completed within")
    return figure


def rhos(comparison: Comparison) -> "Figure":
    """A point a job; the bar is the median."""
    figure, (axes,) = _figure(7.0, 0.8 + 0.5 * len(comparison.policies))
    colours = _colours(comparison.policies)
    everything = [1.0]
    for row, policy in enumerate(comparison.policies):
        jobs = [job for run in comparison.common if run.policy == policy for job in run.summary.per_job]
        values = np.sort([job.rho for job in jobs if job.rho is not None])
        if not values.size:
            continue
        # Neighbours in value are set apart by a fixed pattern, so that they can be told from one another.
        heights = row + 0.32 * (np.arange(values.size) * 0.618 % 1 - 0.5) * 2
        axes.plot(values, heights, ".", color=colours[policy], markersize=4, alpha=0.7)
        median = float(np.median(values))
        axes.plot((median, median), (row - 0.4, row + 0.4), color="black", linewidth=2)
        text = f"worst {values[-1]:.2f}, unfair {np.mean(values > 1):.0%}"
        axes.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center")
        everything += [float(values[0]), float(values[-1])]
    _log_axis(axes, min(everything) / 1.1, max(everything) * 1.1)
    axes.axvline(1.0, color=GREY, linewidth=1, zorder=0)
    axes.set_ylim(len(comparison.policies) - 0.5, -0.5)
    axes.set_yticks(range(len(comparison.policies)), comparison.policies)
    axes.set_xlabel("finish-time fairness rho (above 1: slower than alone on its share); bar: median")
    return figure


# --------------------------------------------------------------------------- of one set and seed


def timeline(runs: dict[str, RunHistory], label: str) -> "Figure":
    """A row for each job from its submission to its end; the height of the bar is the number of its slots."""
    from matplotlib.patches import Patch

    most = max(len(run.jobs) for run in runs.values())
    figure, panels = _figure(8.0, len(runs) * (0.5 + 0.2 * min(most, MAX_NAMED_JOBS)), len(runs))
    applications = sorted({job.spec.application for run in runs.values() for job in run.jobs.values()})
    colours = _colours(applications)
    tallest = max((n for run in runs.values() for job in run.jobs.values() for _, n in job.slots), default=1)
    slots = "1 slot" if tallest == 1 else f"{tallest} slots"
    for axes, (policy, run) in zip(panels, runs.items(), strict=True):
        begin_s = min((job.submitted_s for job in run.jobs.values()), default=0.0)
        for row, job in enumerate(run.jobs.values()):
            end_s = run.last_s if job.ended_s is None else job.ended_s
            axes.plot((job.submitted_s - begin_s, end_s - begin_s), (row, row), color=GREY, linewidth=0.8)
            steps = [(t - begin_s, held) for t, held in job.slots]
            times = [t for t, _ in steps] + [end_s - begin_s]
            heights = [-0.9 * held / tallest for _, held in steps] + [0.0]
            axes.fill_between(
                times,
                row + np.array(heights),
                row,
                step="post",
                color=colours[job.spec.application],
                linewidth=0,
            )
        axes.set_ylim(most - 0.5, -1)
        axes.set_yticks(range(len(run.jobs)), run.jobs if most <= MAX_NAMED_JOBS else [""] * len(run.jobs))
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(f"{policy}, {label} (highest bar: {slots}; line: waiting or being verified)")
    panels[-1].set_xlabel("time since the first submission, s")
    panels[-1].set_xlim(left=0)
    patches = [Patch(color=colours[name], label=name) for name in applications]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False)
    return figure


def goodput_over_time(runs: dict[str, RunHistory], label: str) -> "Figure":
    """A panel a policy, in the same units; the line is the mean over the run."""
    figure, panels = _figure(7.0, 0.7 + 1.1 * len(runs), len(runs))
    colours = _colours(list(runs))
    longest_s = max(_span_s(run) for run in runs.values())
    edges_s = np.linspace(0.0, longest_s, PARTS + 1)
    for axes, (policy, run) in zip(panels, runs.items(), strict=True):
        begin_s = min((job.submitted_s for job in run.jobs.values()), default=0.0)
        useful = sum((useful_examples(job, begin_s + edges_s) for job in run.jobs.values()), 0 * edges_s)
        rates = np.diff(useful) / np.diff(edges_s) if longest_s > 0 else 0 * edges_s[1:]
        axes.fill_between(edges_s, np.append(rates, 0.0), step="post", color=colours[policy], linewidth=0)
        span_s = _span_s(run)
        mean = float(useful[-1] - useful[0]) / span_s if span_s > 0 else 0.0
        axes.plot((0, span_s), (mean, mean), color="black", linewidth=1)
        axes.set_title(f"{policy}: mean {mean:.0f} useful examples/s over {span_s:.0f} s", pad=2)
    panels[-1].set_xlim(0, longest_s or 1.0)
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel(f"time since the first submission, s ({label})")
    figure.supylabel("realised goodput, useful examples/s", fontsize=9)
    return figure


def useful_examples(job: JobHistory, times_s: np.ndarray) -> np.ndarray:
    """M0 x progress at these times, by the job's samples: even within a sample's window, still between."""
    at_s, progress = [job.submitted_s], [0.0]
    for t_s, window_s, reached in job.samples.select("time_s", "window_s", "progress").iter_rows():
        at_s += [max(t_s - window_s, at_s[-1]), max(t_s, at_s[-1])]
        progress += [progress[-1], reached]
    if job.completed and job.verifying_s is not None:
        at_s.append(max(job.verifying_s, at_s[-1]))
        progress.append(job.completed.progress)
    return np.array(job.spec.min_batch_size * np.interp(times_s, at_s, progress))


def _span_s(run: RunHistory) -> float:
    begins = [job.submitted_s for job in run.jobs.values()]
    ends = [run.last_s if job.ended_s is None else job.ended_s for job in run.jobs.values()]
    return max(ends) - min(begins) if begins else 0.0
