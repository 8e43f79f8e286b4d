"""The report of an experiment: its runs are read, compared, and shown as JSON, Markdown, text and figures."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from analysis.compare.comparison import MEASURES, Comparison, Effect, Measure, compare
from analysis.compare.conditions import noise
from analysis.compare.experiment_runs import Experiment, gather
from analysis.compare.intervals import ENOUGH_PAIRS, LEVEL
from analysis.compare.pairing import LeftOut
from analysis.compare.verdicts import summary_sentences, verdicts
from analysis.log.history import RunHistory
from analysis.report.comparison_figures import write_all
from analysis.report.comparison_tables import comparison_tables
from analysis.report.tables import stdout_console, to_console, to_markdown
from analysis.run.fairness import IsolatedTime
from common.lifecycle import UserError

JSON_FILE, MARKDOWN_FILE = "comparison.json", "comparison.md"
METHOD = (
    "Runs are paired by workload set and seed. Ratios are geometric means over the pairs; differences "
    f"are arithmetic means. Square brackets hold a {LEVEL:.0%} bootstrap interval: pairs are resampled "
    "within each set, with corrections for small samples. It holds for these sets and says nothing "
    f"about other sets. Fewer than {ENOUGH_PAIRS} pairs give no interval: round brackets hold their "
    "range, and the verdict is inconclusive. Every interval stands alone: among many, some miss the "
    "truth by chance. An experiment repeats a run in which a job fails, just as it repeats a run lost "
    "to noise, so every figure comes from runs in which all jobs reached their targets. Goodput counts "
    "all progress, also that of jobs that need more progress to reach their targets. Step time is the "
    "time that the steps of a run took, divided by the time that the profiles predict for the same "
    "steps in the same configurations: 1 if the machine was as fast as during calibration. A ratio of "
    "step times other than 1 means that two policies had a machine of different speed, or filled it "
    "differently (profiles are measured on a full cluster), or that the profiles fit the configurations "
    "of one policy better. No ratio is corrected for it except mean JCT / step time, which assumes that "
    "all of a completion time scales with the steps."
)
SCOPE = (
    "Scope: small CPU jobs, a simplified goodput model and the policies named here. This is no evidence "
    "about many-GPU training in production."
)


class ReferenceModel(Protocol):
    """Predicts how long jobs take alone, and how fast the machine was."""

    def __call__(self, run: RunHistory, /) -> IsolatedTime | None: ...

    def step_time(self, run: RunHistory, /) -> float | None: ...


@dataclass(frozen=True)
class ComparisonReport:
    """`rho_from` names the source of the isolated times; `is_calibrated`: they come from profiles."""

    experiment: Experiment
    comparison: Comparison
    rho_from: str
    is_calibrated: bool

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Also the runs that were lost and repeated."""
        return (*self.comparison.left_out, *self.experiment.lost)


def make_report(
    place: Path,
    baselines: Sequence[str],
    model: ReferenceModel,
    rho_from: str,
    *,
    may_fall_back: bool,
    progress: Callable[[Sequence[Path]], Iterable[Path]] = lambda folders: folders,
) -> ComparisonReport:
    """Read the runs in `place` and compare their policies.

    `model` gives the isolated times for rho, and `rho_from` names it. If it cannot judge a run and
    `may_fall_back`, the models in each run's own log are used instead. `progress` may show how far the
    reading is. Raises UserError.
    """
    is_calibrated = True
    try:
        try:
            experiment = gather(place, model, model.step_time, progress)
        except UserError as error:
            # Runs with other applications or slots than the profiles can still be judged by their own logs.
            if not may_fall_back:
                raise
            is_calibrated = False
            rho_from = f"the models in each run's own log, as in summarize ({error})"
            experiment = gather(place, progress=progress)
    except ValueError as error:  # a path with a NUL
        raise UserError(str(error)) from error
    comparison = compare(experiment.runs, experiment.left_out, baselines)
    _check(comparison, place, baselines)
    return ComparisonReport(experiment, comparison, rho_from, is_calibrated)


def _check(comparison: Comparison, place: Path, baselines: Sequence[str]) -> None:
    """Raises UserError if there is nothing to compare."""
    why = "; ".join(f"{entry.run}: {entry.why}" for entry in comparison.left_out[:3])
    more = f" (left out: {why}{'; ...' if len(comparison.left_out) > 3 else ''})" if why else ""
    policies = ", ".join(comparison.policies)
    if len(comparison.policies) < 2:
        raise UserError(
            f"{place}: usable runs of at least two policies are needed; found: {policies or 'none'}{more}"
        )
    for baseline in baselines:
        if baseline not in comparison.policies:
            raise UserError(f"--baseline {baseline!r}: it has no usable run; allowed: {policies}{more}")
    if not any(contrast.pairs for contrast in comparison.contrasts):
        raise UserError(f"{place}: no two usable runs have the same set and seed{more}")


# --------------------------------------------------------------------------- data


def to_json(report: ComparisonReport) -> str:
    """The content of comparison.json: effects by measure and pair, overall and by set; means, verdicts, and
    what a reader needs to know about them."""
    experiment, comparison = report.experiment, report.comparison
    content = {
        **_effects_by_measure({contrast.name: contrast.overall for contrast in comparison.contrasts}),
        "by_set": {
            name: _effects_by_measure(
                {c.name: c.by_set[name] for c in comparison.contrasts if name in c.by_set}
            )
            for name in comparison.sets
        },
        "policies": comparison.means,
        "verdicts": [verdict for contrast in comparison.contrasts for verdict in verdicts(contrast)],
        "left_out": report.left_out,
        "runs": [run.name for run in comparison.runs],
        "step_times": {run.name: run.step_time for run in comparison.runs},
        "isolated": experiment.alone,
        "memory": experiment.memory,
        "rho": report.rho_from,
        "method": METHOD,
        "scope": SCOPE,
        "noise": noise(comparison.runs, experiment.records),
        **experiment.made_by,
        "date": experiment.date,
    }
    # msgspec writes NaN and infinity as null; json keeps to ASCII, whatever the encoding of stdout.
    return json.dumps(msgspec.json.decode(msgspec.json.encode(content)), indent=2) + "\n"


def _effects_by_measure(by_contrast: dict[str, dict[str, Effect]]) -> dict[str, object]:
    return {
        measure.name: {
            name: _effect_json(measure, effects[measure.name]) for name, effects in by_contrast.items()
        }
        for measure in MEASURES
    }


def _effect_json(measure: Measure, effect: Effect) -> dict[str, object]:
    """`bounds` says what `low` and `high` are: "interval" or "range"."""
    low, high, kind = effect.bounds or (None, None, None)
    key = "ratio" if measure.is_ratio else "difference"
    return {key: effect.value, "low": low, "high": high, "bounds": kind, "pairs": effect.pairs}


# --------------------------------------------------------------------------- text


def markdown(report: ComparisonReport) -> str:
    lines = [f"{_heading(report)}.", ""]
    for table in comparison_tables(report.experiment, report.comparison):
        lines += [to_markdown(table), ""]
    lines += [f"- {line}" for contrast in report.comparison.shown() for line in summary_sentences(contrast)]
    lines += ["", f"Left out: {'' if report.left_out else 'nothing.'}"]
    lines += [f"- {entry.run}: {entry.why}" for entry in report.left_out]
    lines += ["", *_notes(report)]
    return "\n".join(lines) + "\n"


def print_report(report: ComparisonReport) -> None:
    """Print the same text on stdout. Names come from logs and are never read as markup."""
    from rich.text import Text

    console = stdout_console()
    console.print(Text(f"{report.experiment.place}: {_heading(report)}", style="bold"))
    for table in comparison_tables(report.experiment, report.comparison):
        console.print()
        to_console(console, table)
    console.print()
    for contrast in report.comparison.shown():
        on_jct, on_others = summary_sentences(contrast)
        console.print(Text(f"- {on_jct}"))
        console.print(Text(f"  {on_others}", style="dim"))
    console.print()
    console.print(Text("Left out:" if report.left_out else "Left out: nothing.", style="bold"))
    for entry in report.left_out:
        console.print(Text(f"  - {entry.run}: {entry.why}", style="yellow"))
    console.print()
    for note in _notes(report):
        console.print(Text(note, style="dim"))


def _heading(report: ComparisonReport) -> str:
    comparison, date = report.comparison, report.experiment.date
    runs, sets = len(comparison.runs), len(comparison.sets)
    return (
        f"{runs} run{'' if runs == 1 else 's'} of {len(comparison.policies)} policies, "
        f"{sets} set{'' if sets == 1 else 's'} ({', '.join(comparison.sets)}){f', {date}' if date else ''}"
    )


def _notes(report: ComparisonReport) -> Iterator[str]:
    """What a reader has to know about the figures."""
    yield METHOD
    if memory := report.experiment.memory:
        yield (
            f"With a memory: {', '.join(memory)}. Jobs start from what earlier jobs of their application in "
            "the same run have shown."
        )
    yield (
        "rho: completion time divided by that of the same job alone on its share of the slots, which is "
        "slots / mean number of jobs active during its life. A policy that lets more jobs overlap has "
        f"smaller shares. Isolated times come from {report.rho_from}."
    )
    if alone := report.experiment.alone:
        errors = [abs(run.relative_error) for run in alone]
        yield (
            f"Isolated times were checked against {len(errors)} real runs of one job alone: mean error "
            f"{sum(errors) / len(errors):.1%}, largest {max(errors):.1%}."
        )
    else:
        lacking = "usable real run of one job alone" if report.is_calibrated else "calibrated model"
        yield f"Isolated times were not checked: there is no {lacking}."
    yield SCOPE


# --------------------------------------------------------------------------- files, progress


def write(report: ComparisonReport, out: Path) -> None:
    """Write comparison.json, comparison.md and the figures. Raises UserError if `out` cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = write_all(report.experiment, report.comparison, out)
        links = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures)
        (out / JSON_FILE).write_text(to_json(report), encoding="utf-8")
        (out / MARKDOWN_FILE).write_text(markdown(report) + links, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error


def with_progress_bar(folders: Sequence[Path]) -> Iterable[Path]:
    """Shows a bar on stderr while the folders are read, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(folders, "reading", console=console, transient=True, disable=not console.is_terminal)
