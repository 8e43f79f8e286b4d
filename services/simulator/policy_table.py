"""Results as tables: one row per policy in Markdown, or one row per run."""

from collections.abc import Callable, Sequence

from analysis.report.tables import Table, decimal, format_or_dash, to_markdown
from services.simulator.results import Result

RUN_COLUMNS = (
    "run",
    "jobs",
    "mean JCT",
    "p99 JCT",
    "makespan",
    "rounds",
    "ms",
    "/bound",
    "rho",
    "unfair",
    "CPU s",
)
COLUMNS = ("policy", "runs", "mean JCT s", "p99 JCT s", "makespan s", "goodput /s", "worst rho", "unfair")


def run_table(results: Sequence[Result]) -> Table:
    """One row per run."""
    rows = [
        [
            result.run_id,
            str(len(result.jcts_s)),
            decimal(result.mean_jct_s),
            decimal(result.p99_jct_s),
            decimal(result.makespan_s, 0),
            str(result.rounds),
            decimal(result.decision_ms.mean if result.decision_ms else None, 2),
            decimal(result.value_over_bound, 4),
            decimal(result.rho.worst if result.rho else None, 2),
            decimal(result.rho.unfair_fraction if result.rho else None, 3),
            decimal(result.cpu_s),
        ]
        for result in results
    ]
    title = "JCT and makespan in virtual seconds; ms: mean time of a decision; rho: the worst"
    return Table(title, RUN_COLUMNS, rows)


def comparison(results: Sequence[Result]) -> str:
    """One row per policy: means over its runs (each run counts the same), the worst rho of all of them, and
    the mean JCT on each workload. A dash if a run lacks the figure."""
    policies = list(dict.fromkeys(result.policy for result in results))
    workloads = list(dict.fromkeys(result.label for result in results))
    each = workloads if len(workloads) > 1 else []
    rows = []
    for policy in policies:
        runs = [result for result in results if result.policy == policy]
        rows.append(
            [
                policy,
                str(len(runs)),
                _over(runs, lambda run: run.mean_jct_s, ".0f"),
                _over(runs, lambda run: run.p99_jct_s, ".0f"),
                _over(runs, lambda run: run.makespan_s, ".0f"),
                _over(runs, lambda run: run.goodput, ".0f"),
                _over(runs, lambda run: run.rho.worst if run.rho else None, ".2f", max),
                _over(runs, lambda run: run.rho.unfair_fraction if run.rho else None, ".1%"),
                *(
                    _over([run for run in runs if run.label == label], lambda run: run.mean_jct_s, ".0f")
                    for label in each
                ),
            ]
        )
    return to_markdown(Table("", [*COLUMNS, *each], rows))


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures)


def _over(
    runs: Sequence[Result],
    figure: Callable[[Result], float | None],
    form: str,
    of: Callable[[Sequence[float]], float] = _mean,
) -> str:
    known = [value for run in runs if (value := figure(run)) is not None]
    return format_or_dash(of(known) if known and len(known) == len(runs) else None, form)
