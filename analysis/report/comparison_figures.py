"""The figures of a comparison, as SVG.

Next to each figure a JSON file names the runs behind it and the digests of their logs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from analysis.compare.comparison import JCT, Comparison
from analysis.compare.experiment_runs import Experiment
from analysis.compare.intervals import ENOUGH_PAIRS, LEVEL
from analysis.compare.pairing import ComparedRun
from analysis.log.history import JobHistory, RunHistory
from analysis.report.figures import GREY, colors_of, figure_style, new_figure, save_svg, set_log_ticks
from common.eventlog import EVENTS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICK_FACTORS = (1.0, 2.0, 5.0, 1.5, 3.0, 7.0, 8.0, 6.0, 1.2)
MIN_TICK_DISTANCE = 0.045
GOODPUT_INTERVALS = 60
"""The number of equal intervals on the time axis of goodput."""
MAX_NAMED_JOBS = 40


def write_all(experiment: Experiment, comparison: Comparison, out: Path) -> list[Path]:
    """Draw every figure that the comparison has the runs for; returns their paths. Raises OSError."""
    written: list[Path] = []

    def write(name: str, figure: "Figure", runs: Iterable[ComparedRun], shows: str) -> None:
        written.append(save(figure, out / f"{name}.svg", [experiment.log(run) for run in runs], shows))

    with figure_style():
        write(
            "mean-jct-ratio",
            ratios(comparison),
            _paired_runs(comparison),
            f"mean JCT ratio of each two policies, overall and by set, with {LEVEL:.0%} intervals or ranges",
        )
        if comparison.common:
            shows = "job completion times of all jobs, by policy"
            write("jct", completion_times(comparison), comparison.common, shows)
            if any(job.rho is not None for run in comparison.common for job in run.summary.per_job):
                shows = "finish-time fairness rho of all jobs, by policy"
                write("rho", rhos(comparison), comparison.common, shows)
        if pair := median_pair(comparison):
            run, baseline = pair
            block = sorted(
                (one for one in comparison.runs if (one.set, one.seed) == (run.set, run.seed)),
                key=lambda one: comparison.policies.index(one.policy),
            )
            histories = {one.policy: experiment.history(one) for one in block}
            label = f"{run.set}, seed {run.seed}"
            both = {one.policy: histories[one.policy] for one in (run, baseline)}
            shows = f"slots of each job over time, {label}: the pair with the median mean JCT ratio"
            write("timeline", timeline(both, label), pair, shows)
            shows = f"realised goodput over time, by policy, {label}"
            write("goodput", goodput_over_time(histories, label), block, shows)
    return written


def save(figure: "Figure", path: Path, logs: Iterable[Path], shows: str) -> Path:
    """Write a figure, and next to it the logs behind it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_svg(figure, path, bbox_inches="tight")
    content = {"figure": path.name, "shows": shows, "runs": [_trace(log) for log in logs]}
    path.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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


def _paired_runs(comparison: Comparison) -> list[ComparedRun]:
    """Every run that is in a pair, in the order of the contrasts."""
    runs = {run.name: run for run in comparison.runs}
    names = (
        name
        for contrast in comparison.shown()
        for pair in comparison.pairs_of(contrast).select("run", "run_baseline").iter_rows()
        for name in pair
    )
    return [runs[name] for name in dict.fromkeys(names)]


def median_pair(comparison: Comparison) -> tuple[ComparedRun, ComparedRun] | None:
    """The pair with the median mean JCT ratio: of pollux and fixed, or else of the first contrast."""
    contrast = comparison.contrast("pollux", "fixed") or next(iter(comparison.shown()), None)
    if contrast is None:
        return None
    pairs = comparison.pairs_of(contrast).drop_nulls("change").sort("change", maintain_order=True)
    if pairs.is_empty():
        return None
    names = pairs.row((pairs.height - 1) // 2, named=True)
    runs = {run.name: run for run in comparison.runs}
    return runs[names["run"]], runs[names["run_baseline"]]


def _log_x_axis(axes: "Axes", low: float, high: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    set_log_ticks(axes.xaxis, low, high, TICK_FACTORS, MIN_TICK_DISTANCE)


# --------------------------------------------------------------------------- all runs


def ratios(comparison: Comparison) -> "Figure":
    """One row for each two policies: the overall ratio, and below it the ratio on each set."""
    shown = [contrast for contrast in comparison.shown() if contrast.pairs]
    sets = comparison.sets if len(comparison.sets) > 1 else ()
    colors, spread = colors_of(sets), 0.75 / (len(sets) + 1)
    figure, (axes,) = new_figure(7.0, 0.9 + len(shown) * (0.3 + 0.11 * len(sets)))
    values = [1.0]
    for row, contrast in enumerate(shown):
        points = [("overall", contrast.overall, "black", "D", 6.0)]
        points += [(name, contrast.by_set.get(name, {}), colors[name], "o", 4.0) for name in sets]
        for number, (name, effects, color, marker, size) in enumerate(points):
            effect = effects.get(JCT.name)
            if effect is None or effect.value is None:
                continue
            y = row - 0.375 + (number + 0.5) * spread
            ends = effect.bounds[:2] if effect.bounds else (effect.value, effect.value)
            is_range = effect.bounds is not None and effect.bounds.kind == "range"
            axes.plot(
                ends,
                (y, y),
                color=color,
                linewidth=0.8 if is_range else 1.5,
                linestyle=":" if is_range else "-",
                solid_capstyle="butt",
            )
            label = name if row == 0 else None
            axes.plot(effect.value, y, marker, color=color, markersize=size, linestyle="none", label=label)
            values += ends
        axes.axhline(row + 0.5, color="#EEEEEE", linewidth=0.8, zorder=0)
    _log_x_axis(axes, min(values) / 1.15, max(values) * 1.15)
    axes.axvline(1.0, color=GREY, linewidth=1, zorder=0)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks(range(len(shown)), [contrast.name for contrast in shown])
    axes.set_xlabel(
        "mean JCT ratio (below 1: the first policy is faster)\n"
        f"solid: {LEVEL:.0%} interval; dotted: range of fewer than {ENOUGH_PAIRS} pairs"
    )
    if sets:
        figure.legend(loc="outside upper center", ncols=5, frameon=False)
    return figure


def completion_times(comparison: Comparison) -> "Figure":
    """One empirical distribution function per policy, each labelled at a height of its own."""
    from matplotlib.patheffects import withStroke

    figure, (axes,) = new_figure(7.0, 4.0)
    colors = colors_of(comparison.policies)
    limits_s: list[float] = []
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
        limits_s += [float(times_s[0]), float(times_s[-1])]
        parts = np.arange(1, len(times_s) + 1) / len(times_s)
        axes.ecdf(times_s, color=colors[policy], linewidth=1.5)
        height = 0.12 + 0.76 * number / max(len(comparison.policies) - 1, 1)
        at_s = times_s[min(int(np.searchsorted(parts, height)), len(times_s) - 1)]
        axes.plot(at_s, height, "o", color=colors[policy], markersize=4)
        axes.annotate(
            f"{policy} (mean {times_s.mean():.1f} s)",
            (at_s, height),
            xytext=(5, 0),
            textcoords="offset points",
            color=colors[policy],
            va="center",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
    axes.set_ylim(0, 1.01)
    _log_x_axis(axes, min(limits_s) / 1.1, max(limits_s) * 1.1)
    axes.set_xlabel("job completion time, s")
    axes.set_ylabel("fraction of jobs completed")
    return figure


def rhos(comparison: Comparison) -> "Figure":
    """One point per job; the bar is the median."""
    figure, (axes,) = new_figure(7.0, 0.8 + 0.5 * len(comparison.policies))
    colors = colors_of(comparison.policies)
    limits = [1.0]
    for row, policy in enumerate(comparison.policies):
        jobs = [job for run in comparison.common if run.policy == policy for job in run.summary.per_job]
        values = np.sort([job.rho for job in jobs if job.rho is not None])
        if not values.size:
            continue
        # A fixed pattern of heights keeps points with neighboring values apart.
        heights = row + 0.32 * (np.arange(values.size) * 0.618 % 1 - 0.5) * 2
        axes.plot(values, heights, ".", color=colors[policy], markersize=4, alpha=0.7)
        median = float(np.median(values))
        axes.plot((median, median), (row - 0.4, row + 0.4), color="black", linewidth=2)
        text = f"worst {values[-1]:.2f}, unfair {np.mean(values > 1):.0%}"
        axes.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center")
        limits += [float(values[0]), float(values[-1])]
    _log_x_axis(axes, min(limits) / 1.1, max(limits) * 1.1)
    axes.axvline(1.0, color=GREY, linewidth=1, zorder=0)
    axes.set_ylim(len(comparison.policies) - 0.5, -0.5)
    axes.set_yticks(range(len(comparison.policies)), comparison.policies)
    axes.set_xlabel("finish-time fairness rho (above 1: slower than alone on its share); bar: median")
    return figure


# --------------------------------------------------------------------------- one set and seed


def timeline(runs: Mapping[str, RunHistory], label: str) -> "Figure":
    """One panel per policy and one row per job, from submission to end; the height of a bar is its slots."""
    from matplotlib.patches import Patch

    most = max(len(run.jobs) for run in runs.values())
    figure, panels = new_figure(8.0, len(runs) * (0.5 + 0.2 * min(most, MAX_NAMED_JOBS)), rows=len(runs))
    applications = sorted({job.spec.application for run in runs.values() for job in run.jobs.values()})
    colors = colors_of(applications)
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
                color=colors[job.spec.application],
                linewidth=0,
            )
        axes.set_ylim(most - 0.5, -1)
        axes.set_yticks(range(len(run.jobs)), run.jobs if most <= MAX_NAMED_JOBS else [""] * len(run.jobs))
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(f"{policy}, {label} (highest bar: {slots}; line: waiting or in verification)")
    panels[-1].set_xlabel("time since the first submission, s")
    panels[-1].set_xlim(left=0)
    patches = [Patch(color=colors[name], label=name) for name in applications]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False)
    return figure


def goodput_over_time(runs: Mapping[str, RunHistory], label: str) -> "Figure":
    """One panel per policy, all in the same units; the line is the mean over the run."""
    figure, panels = new_figure(7.0, 0.7 + 1.1 * len(runs), rows=len(runs))
    colors = colors_of(list(runs))
    longest_s = max(_span_s(run) for run in runs.values())
    edges_s = np.linspace(0.0, longest_s, GOODPUT_INTERVALS + 1)
    for axes, (policy, run) in zip(panels, runs.items(), strict=True):
        begin_s = min((job.submitted_s for job in run.jobs.values()), default=0.0)
        useful = sum((useful_examples_at(job, begin_s + edges_s) for job in run.jobs.values()), 0 * edges_s)
        rates = np.diff(useful) / np.diff(edges_s) if longest_s > 0 else 0 * edges_s[1:]
        axes.fill_between(edges_s, np.append(rates, 0.0), step="post", color=colors[policy], linewidth=0)
        span_s = _span_s(run)
        mean = float(useful[-1] - useful[0]) / span_s if span_s > 0 else 0.0
        axes.plot((0, span_s), (mean, mean), color="black", linewidth=1)
        axes.set_title(f"{policy}: mean {mean:.0f} useful examples/s over {span_s:.0f} s", pad=2)
    panels[-1].set_xlim(0, longest_s or 1.0)
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel(f"time since the first submission, s ({label})")
    figure.supylabel("realised goodput, useful examples/s", fontsize="medium")
    return figure


def useful_examples_at(job: JobHistory, times_s: np.ndarray) -> np.ndarray:
    """M0 x progress at each time (an array of the same shape). Progress grows evenly within the window of
    each sample of the job, and stands still between windows."""
    at_s, progress = [job.submitted_s], [0.0]
    for t_s, window_s, reached in job.samples.select("time_s", "window_s", "progress").iter_rows():
        at_s += [max(t_s - window_s, at_s[-1]), max(t_s, at_s[-1])]
        progress += [progress[-1], reached]
    if job.completed and job.verifying_s is not None:
        at_s.append(max(job.verifying_s, at_s[-1]))
        progress.append(job.completed.progress)
    return np.array(job.spec.min_batch_size * np.interp(times_s, at_s, progress))


def _span_s(run: RunHistory) -> float:
    """From the first submission to the last end."""
    begins = [job.submitted_s for job in run.jobs.values()]
    ends = [run.last_s if job.ended_s is None else job.ended_s for job in run.jobs.values()]
    return max(ends) - min(begins) if begins else 0.0
