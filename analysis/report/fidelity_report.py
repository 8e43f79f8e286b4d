"""The comparison of real with simulated runs for people: tables in Markdown, and a figure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from analysis.fidelity.fidelity import Fidelity, Sides, place
from analysis.fidelity.run_pairs import Pair
from analysis.fidelity.winners import Winner
from analysis.report.figures import COLOURS, GREY, STYLE
from analysis.run.breakdown import PARTS

TICKS_S = [factor * 10**power for power in range(-2, 6) for factor in (1, 2, 3, 5, 7)]
APPLICATION_MEASURES = ("jct_s", "training_s", "step_s", "progress", "replicas", "batch", "rescales")


def markdown(found: Fidelity, note: str = "") -> str:
    """Every table of `fidelity.md`; `note`: what else there is to know."""
    correlation = found.rank_correlation
    parts = [
        "# Simulator against reality\n",
        f"{found.runs} runs, {found.jobs} jobs that completed on both sides"
        + (f"; measured {found.date}" if found.date else "")
        + f". An error is simulated / real - 1. Each run counts alike.{note and ' ' + note}\n",
        "## Mean completion time, by policy\n",
        _table(
            ("policy", "real s", "simulated s", "error", "mean error of a job"),
            (
                (
                    policy,
                    _n(sides.real),
                    _n(sides.simulated),
                    _percent(sides.error),
                    f"{found.job_jct_error[policy]:.1%}",
                )
                for policy, sides in found.mean_jct_s.items()
            ),
        ),
        "## Error of the mean completion time, by set and policy\n",
        _table(
            ("set", *found.mean_jct_error, "all"),
            (
                (
                    name,
                    *(_percent(errors.get(policy)) for policy in found.mean_jct_error),
                    _percent(found.mean_jct_error_by_set[name]),
                )
                for name, errors in found.mean_jct_error_by_set_and_policy.items()
            ),
        ),
        f"Rank correlation of the jobs' completion times (Spearman): {_n(correlation.overall, 3)} over all, "
        f"within a run {_n(correlation.within_mean, 3)} on average and {_n(correlation.within_least, 3)} at "
        f"least. Mean absolute error of a job's completion time: {found.job_jct_error['overall']:.1%}.\n",
    ]
    if found.winners:
        parts += [
            f"## Who wins: the same policy on {found.sets_agreeing} of {len(found.winners)} sets"
            + (
                f", and on {close} more within the noise"
                if (close := found.sets_differing_within_noise)
                else ""
            )
            + "\n",
            f"{found.winner_rule} Reality cannot tell two policies apart where that interval contains 1.\n",
            _table(
                ("set", "seeds", "really", "second, over it [95%]", "simulated", "order (Kendall)", "differ"),
                (
                    (
                        name,
                        str(w.seeds),
                        w.real,
                        _margin(w),
                        w.simulated,
                        _n(found.policy_order[name], 2),
                        _difference(w),
                    )
                    for name, w in found.winners.items()
                ),
            ),
        ]
    if found.ratios:
        parts += [
            "## Ratios of mean completion times\n",
            _table(
                ("policies", "real", "simulated"),
                ((name, _n(sides.real, 3), _n(sides.simulated, 3)) for name, sides in found.ratios.items()),
            ),
        ]
    if found.batch_efficiency:
        parts += [
            "## Batches, over the best ones\n",
            "The part of its time that training takes if every batch is the best one for its slots and its "
            "progress, by the profiles: what is left to win by batches alone.\n",
            _table(
                ("policy", "real", "simulated"),
                (
                    (policy, _n(sides.real, 3), _n(sides.simulated, 3))
                    for policy, sides in found.batch_efficiency.items()
                ),
            ),
        ]
    parts += [
        "## What a completion time consists of (mean seconds a job, real / simulated)\n",
        _both("policy", found.parts, PARTS),
        "## By application (means a job, real / simulated)\n",
        _both("application", found.applications, APPLICATION_MEASURES),
    ]
    if found.left_out:
        parts += ["## Left out\n", *(f"* {left.run}: {left.why}" for left in found.left_out), ""]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _both(what: str, tables: Mapping[str, Mapping[str, Sides]], measures: Sequence[str]) -> str:
    heads = [measure.removesuffix("_s").replace("_", " ") for measure in measures]
    rows = (
        (
            name,
            *(
                f"{_n(s.real, digits)} / {_n(s.simulated, digits)}" if (s := sides.get(m)) else "-"
                for m in measures
                for digits in (3 if m == "step_s" else 1,)
            ),
        )
        for name, sides in tables.items()
    )
    return _table((what, *heads), rows)


def _margin(winner: Winner) -> str:
    text = f"{winner.runner_up} {winner.margin:.3f}"
    if winner.margin_low is None:
        return f"{text}; one seed, no interval"
    told = "could be noise" if winner.margin_noise else "told apart"
    return f"{text} [{winner.margin_low:.3f}, {_n(winner.margin_high, 3)}]: {told}"


def _difference(winner: Winner) -> str:
    if winner.agree:
        return "-"
    noise = {None: "", True: "; could be noise", False: ""}[winner.could_be_noise]
    seeds = f"in {winner.seeds_for_real} of {winner.seeds} seeds"
    return f"{winner.simulated} was {winner.apart:.1%} behind, {seeds}{noise}"


def _n(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


# --------------------------------------------------------------------------- the figure


def draw(pairs: Sequence[Pair], path: Path) -> None:
    """Real against simulated completion time of every job, by policy; the same runs give the same bytes.
    Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure

    policies = sorted({pair.policy for pair in pairs}, key=place)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        axes = figure.subplots()
        everything: list[float] = []
        for policy, colour in zip(policies, cycle(COLOURS), strict=False):
            own = [pair for pair in pairs if pair.policy == policy]
            real = [job.jct_s for pair in own for job in pair.real.values()]
            simulated = [job.jct_s for pair in own for job in pair.simulated.values()]
            axes.scatter(real, simulated, s=12, alpha=0.7, linewidths=0, color=colour, label=policy)
            everything += real + simulated
        ends = min(everything) / 1.2, max(everything) * 1.2
        for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            line = [factor * end for end in ends]
            axes.plot(ends, line, color=GREY, linewidth=0.8, linestyle=style, zorder=0)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ticks = [tick for tick in TICKS_S if ends[0] <= tick <= ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.set(xlabel="job completion time, real, s", ylabel="simulated, s (dotted: 10% off)")
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
