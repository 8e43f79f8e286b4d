"""The comparison of simulated with real runs for people: Markdown and a figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.compare.pairing import rank
from analysis.fidelity.agreement import Fidelity, Sides
from analysis.fidelity.run_pairs import Pair
from analysis.fidelity.winners import Winner
from analysis.report.figures import GREY, colors_of, figure_style, new_figure, save_svg, set_log_ticks
from analysis.report.tables import Table, decimal, format_or_dash, to_markdown
from analysis.run.breakdown import PARTS

TICK_FACTORS = (1, 2, 3, 5, 7)
APPLICATION_MEASURES = ("jct_s", "training_s", "step_s", "progress", "replicas", "batch", "rescales")


def markdown(found: Fidelity, note: str = "") -> str:
    """The content of `fidelity.md`. `note` follows the introduction."""
    sections = [
        "# Simulator against reality",
        _introduction(found, note),
        "## Mean completion time, by policy",
        _jct_table(found),
        "## Error of the mean completion time, by set and policy",
        _error_table(found),
        _correlation(found),
    ]
    if found.winners:
        sections += [_winners_heading(found), found.winner_rule, _winners_table(found)]
    if found.ratios:
        sections += ["## Ratios of mean completion times", _sides_table("policies", found.ratios)]
    if found.batch_efficiency:
        sections += [
            "## Batches, compared with the best ones",
            "The fraction of its time that training would take if every batch were the best one for its "
            "slots and its progress, by the profiles. The rest could be won by better batches alone.",
            _sides_table("policy", found.batch_efficiency),
        ]
    sections += [
        "## Parts of a completion time (mean seconds per job, real / simulated)",
        _both_sides_table("policy", found.parts, PARTS),
        "## By application (means over jobs, real / simulated)",
        _both_sides_table("application", found.applications, APPLICATION_MEASURES),
    ]
    if found.left_out:
        left_out = "\n".join(f"* {entry.run}: {entry.why}" for entry in found.left_out)
        sections += ["## Left out", left_out]
    return "\n\n".join(sections) + "\n"


def _introduction(found: Fidelity, note: str) -> str:
    date = f"; measured {found.date}" if found.date else ""
    return (
        f"{found.runs} runs, {found.jobs} jobs that completed on both sides{date}. An error is simulated / "
        f"real - 1. Each run counts the same.{note and ' ' + note}"
    )


def _jct_table(found: Fidelity) -> str:
    columns = ("policy", "real s", "simulated s", "error", "mean error per job")
    rows = [
        (
            policy,
            decimal(sides.real),
            decimal(sides.simulated),
            format_or_dash(sides.error, "+.1%"),
            f"{found.job_jct_error[policy]:.1%}",
        )
        for policy, sides in found.mean_jct_s.items()
    ]
    return to_markdown(Table("", columns, rows))


def _error_table(found: Fidelity) -> str:
    policies = list(found.mean_jct_error)
    rows = [
        [
            name,
            *(format_or_dash(errors.get(policy), "+.1%") for policy in policies),
            format_or_dash(found.mean_jct_error_by_set[name], "+.1%"),
        ]
        for name, errors in found.mean_jct_error_by_set_and_policy.items()
    ]
    return to_markdown(Table("", ["set", *policies, "all"], rows))


def _correlation(found: Fidelity) -> str:
    correlation = found.rank_correlation
    return (
        f"Rank correlation of the jobs' completion times (Spearman): {decimal(correlation.overall, 3)} over "
        f"all jobs; within a run {decimal(correlation.within_mean, 3)} on average and "
        f"{decimal(correlation.within_least, 3)} at least. Mean absolute error of a job's completion time: "
        f"{found.job_jct_error['overall']:.1%}."
    )


def _winners_heading(found: Fidelity) -> str:
    noise = found.sets_differing_within_noise
    inconclusive = f"; on {noise} more, reality is inconclusive" if noise else ""
    return f"## Winners: the same policy on {found.sets_agreeing} of {len(found.winners)} sets{inconclusive}"


def _winners_table(found: Fidelity) -> str:
    columns = ("set", "seeds", "real", "margin of the second", "simulated", "order (Kendall)", "difference")
    rows = [
        (
            name,
            str(winner.seeds),
            winner.real,
            _margin(winner),
            winner.simulated,
            decimal(found.policy_order[name], 2),
            _difference(winner),
        )
        for name, winner in found.winners.items()
    ]
    return to_markdown(Table("", columns, rows))


def _margin(winner: Winner) -> str:
    low, high = decimal(winner.margin_low, 3), decimal(winner.margin_high, 3)
    bounds = {"interval": f" [{low}, {high}]", "range": f" ({low} to {high})", None: ""}[winner.margin_bounds]
    verdict = "inconclusive" if winner.margin_noise else "conclusive"
    return f"{winner.runner_up} {winner.margin:.3f}{bounds}: {verdict}"


def _difference(winner: Winner) -> str:
    if winner.agree:
        return "-"
    noise = "; inconclusive" if winner.could_be_noise else ""
    return (
        f"{winner.simulated} was {winner.apart:.1%} behind, in {winner.seeds_for_real} of {winner.seeds} "
        f"seeds{noise}"
    )


def _sides_table(what: str, by_name: Mapping[str, Sides]) -> str:
    rows = [(name, decimal(sides.real, 3), decimal(sides.simulated, 3)) for name, sides in by_name.items()]
    return to_markdown(Table("", (what, "real", "simulated"), rows))


def _both_sides_table(what: str, by_name: Mapping[str, Mapping[str, Sides]], measures: Sequence[str]) -> str:
    def cell(measure: str, sides: Sides | None) -> str:
        digits = 3 if measure == "step_s" else 1
        return f"{decimal(sides.real, digits)} / {decimal(sides.simulated, digits)}" if sides else "-"

    columns = [what, *(measure.removesuffix("_s").replace("_", " ") for measure in measures)]
    rows = [
        [name, *(cell(measure, sides.get(measure)) for measure in measures)]
        for name, sides in by_name.items()
    ]
    return to_markdown(Table("", columns, rows))


# --------------------------------------------------------------------------- figure


def draw(pairs: Sequence[Pair], path: Path) -> None:
    """Plot real against simulated completion time of every job, by policy. Raises OSError."""
    with figure_style():
        figure, (axes,) = new_figure(5.2, 5.0)
        limits_s: list[float] = []
        for policy, color in colors_of(sorted({pair.policy for pair in pairs}, key=rank)).items():
            own = [pair for pair in pairs if pair.policy == policy]
            real = [job.jct_s for pair in own for job in pair.real.values()]
            simulated = [job.jct_s for pair in own for job in pair.simulated.values()]
            axes.scatter(real, simulated, s=12, alpha=0.7, linewidths=0, color=color, label=policy)
            limits_s += real + simulated
        ends = min(limits_s) / 1.2, max(limits_s) * 1.2
        for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            line = [factor * end for end in ends]
            axes.plot(ends, line, color=GREY, linewidth=0.8, linestyle=style, zorder=0)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            set_log_ticks(axis, *ends, TICK_FACTORS)
        axes.set(xlabel="job completion time, real, s", ylabel="simulated, s (dotted: 10% off)")
        axes.legend(frameon=False)
        save_svg(figure, path)
