"""The result of a comparison in words. Pure."""

from analysis.compare.comparison import MEASURES, STEP_TIME, Contrast, Effect, Measure
from analysis.compare.intervals import ENOUGH_PAIRS, Outcome
from common.types import Struct

OUTCOMES: tuple[Outcome, ...] = ("better", "worse", "inconclusive")


class Verdict(Struct, frozen=True):
    pair: str
    measure: str
    verdict: Outcome
    sentence: str


def verdicts(contrast: Contrast) -> list[Verdict]:
    """One per measure, except for step time, which is no merit of a policy."""
    return [
        Verdict(
            pair=contrast.name,
            measure=measure.name,
            verdict=contrast.overall[measure.name].outcome(measure),
            sentence=_sentence(contrast, measure),
        )
        for measure in MEASURES
        if measure is not STEP_TIME
    ]


def summary_sentences(contrast: Contrast) -> tuple[str, str]:
    """The verdict on mean JCT, and one sentence on all other measures."""
    on_jct, *others = verdicts(contrast)
    titles = {measure.name: measure.title for measure in MEASURES}
    by_outcome: dict[str, list[str]] = {kind: [] for kind in (*OUTCOMES, "not measured")}
    for verdict in others:
        measured = contrast.overall[verdict.measure].pairs
        by_outcome[verdict.verdict if measured else "not measured"].append(titles[verdict.measure])
    parts = [f"{kind}: {', '.join(measures)}" for kind, measures in by_outcome.items() if measures]
    return on_jct.sentence, f"{contrast.name}, other measures: {'; '.join(parts)}."


def amount(measure: Measure, effect: Effect) -> str:
    """The effect and its interval, as in `0.58 [0.52, 0.66]`, or its range, as in `0.58 (0.52 to 0.66)`."""
    if effect.value is None:
        return "-"
    spec = ".2f" if measure.is_ratio else "+.2f" if measure.key == "unfair_fraction" else "+.1f"
    value = format(effect.value, spec)
    if effect.bounds is None:
        return value
    low, high = format(effect.bounds.low, spec), format(effect.bounds.high, spec)
    return f"{value} [{low}, {high}]" if effect.bounds.kind == "interval" else f"{value} ({low} to {high})"


def _sentence(contrast: Contrast, measure: Measure) -> str:
    effect = contrast.overall[measure.name]
    verdict = effect.outcome(measure)
    title = measure.title[0].upper() + measure.title[1:]
    operator = "/" if measure.is_ratio else "-"
    counts = f"{_pairs(effect.pairs)}, better in {effect.better}"
    if lacking := contrast.pairs - effect.pairs:
        counts += f"; {_pairs(lacking)} without the measure"
    text = f"{title}, {contrast.policy} {operator} {contrast.baseline}: {amount(measure, effect)} ({counts})"
    too_few = f", fewer than {ENOUGH_PAIRS} pairs" if effect.pairs < ENOUGH_PAIRS else ""
    return f"{text}: {verdict}{too_few}{_on_each_set(contrast, measure, verdict)}."


def _on_each_set(contrast: Contrast, measure: Measure, overall: Outcome) -> str:
    """How the verdicts on single sets differ from the overall one."""
    effects = {name: by_measure[measure.name] for name, by_measure in contrast.by_set.items()}
    if len(effects) < 2:
        return ""
    if all(effect.pairs < ENOUGH_PAIRS for effect in effects.values()):
        return "; too few pairs for a verdict on each set"
    by_outcome: dict[Outcome, list[str]] = {kind: [] for kind in sorted(OUTCOMES, key=lambda o: o != overall)}
    for name, effect in effects.items():
        kind = effect.outcome(measure)
        by_outcome[kind].append(name if kind == overall else f"{name}: {amount(measure, effect)}")
    if len(by_outcome[overall]) == len(effects):
        return ", on every set"
    return "".join(f"; {kind} on {', '.join(names)}" for kind, names in by_outcome.items() if names)


def _pairs(count: int) -> str:
    return f"{count} pair{'' if count == 1 else 's'}"
