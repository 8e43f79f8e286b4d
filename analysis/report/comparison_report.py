"""The report on an experiment: its runs are read and compared, and written as JSON, Markdown and figures."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from analysis.compare.comparison import METHOD, SCOPE, Comparison, as_json, compare
from analysis.compare.experiment_runs import gather
from analysis.log.find_logs import NoRuns
from analysis.log.history import RunHistory
from analysis.report.comparison_tables import ComparisonReport, to_markdown
from analysis.report.figures import write_all
from analysis.run.fairness import IsolatedTime
from common.lifecycle import UserError

JSON_FILE, MARKDOWN_FILE = "comparison.json", "comparison.md"


class ShareModel(Protocol):
    """What a job takes alone on its share of the cluster, and how fast the machine was."""

    def __call__(self, run: RunHistory, /) -> IsolatedTime | None: ...

    def step_time(self, run: RunHistory, /) -> float | None: ...


def make_report(
    place: Path,
    baselines: Sequence[str],
    model: ShareModel,
    rho_from: str,
    *,
    may_fall_back: bool,
    shown: Callable[[Sequence[Path]], Iterable[Path]] = lambda folders: folders,
) -> ComparisonReport:
    """Read the runs in `place` and compare their policies. `model` gives the times alone for rho, and
    `rho_from` names it; where it cannot judge a run and `may_fall_back`, each run's own models do. `shown` may
    follow how the reading goes on. Raises UserError for what the user has to mend."""
    is_calibrated = True
    try:
        try:
            experiment = gather(place, model, model.step_time, shown)
        except UserError as error:
            if not may_fall_back:
                raise
            # Without a profile of its applications, or of its slots, a run can still be judged by itself.
            is_calibrated = False
            rho_from = f"the models in each run's own log, as in summarize ({error})"
            experiment = gather(place, shown=shown)
    except (NoRuns, ValueError) as error:  # ValueError: a path with a NUL
        raise UserError(str(error)) from error
    result = compare(experiment.runs, experiment.left_out, baselines)
    _check(result, place, baselines)
    return ComparisonReport(experiment, result, rho_from, is_calibrated)


def _check(result: Comparison, place: Path, baselines: Sequence[str]) -> None:

    why = "; ".join(f"{entry.run}: {entry.why}" for entry in result.left_out[:3])
    more = f" (left out: {why}{'; ...' if len(result.left_out) > 3 else ''})" if why else ""
    if len(result.policies) < 2:
        found = ", ".join(result.policies) or "none"
        raise UserError(f"{place}: usable runs of two policies or more are needed; there: {found}{more}")
    for baseline in baselines:
        if baseline not in result.policies:
            allowed = ", ".join(result.policies)
            raise UserError(f"--baseline {baseline!r}: no usable run of it; allowed: {allowed}{more}")
    if not any(contrast.pairs for contrast in result.contrasts):
        raise UserError(f"{place}: no two usable runs of the same set and seed{more}")


def to_json(report: ComparisonReport) -> str:
    content = {
        **as_json(report.comparison),
        "left_out": report.left_out,
        "isolated": report.experiment.alone,
        "memory": report.experiment.memory,
        "rho": report.rho_from,
        "method": METHOD,
        "scope": SCOPE,
        "noise": report.noise,
        **report.experiment.made_by,
        "date": report.experiment.date,
    }
    # msgspec writes what is not a number as null; json keeps to ASCII, whatever stdout's encoding.
    return json.dumps(msgspec.json.decode(msgspec.json.encode(content)), indent=2) + "\n"


def write(report: ComparisonReport, out: Path) -> None:
    """Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    figures = write_all(report.experiment, report.comparison, out)
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures)
    (out / JSON_FILE).write_text(to_json(report), encoding="utf-8")
    (out / MARKDOWN_FILE).write_text(to_markdown(report) + shown, encoding="utf-8")
