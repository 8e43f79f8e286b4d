"""Folders of an experiment, made by hand: clean runs of single-slot jobs with given completion times."""

import json
from collections.abc import Sequence
from pathlib import Path

from common.protocol import (
    Event,
    GenerationStarted,
    JobCompleted,
    JobSubmitted,
    RunEnded,
    RunStarted,
    VerificationStarted,
)
from tests.analysis.logs import (
    N0,
    Happening,
    changed,
    decided,
    evaluated,
    exited,
    generation,
    joined,
    sample,
    save,
    spec,
    started,
    verified,
    written,
)

BEGIN_S = 110.0
PROGRESS = 50.0


def life(job_id: str, jct_s: float, rescales: int) -> list[Happening]:
    """A job on a slot of n0 from its submission until a second before its end, when it is verified."""
    end_s = BEGIN_S + jct_s
    window_s = (jct_s - 1.0) / 2
    told: list[tuple[str, float, Event]] = [
        ("agent-n0", BEGIN_S, started(job_id, "n0", f"{job_id}-r", 1)),
        ("scheduler", BEGIN_S, changed(job_id, "starting", "running")),
        (
            "agent-n0",
            end_s - 1.0,
            sample(job_id, 1 + rescales, window_s, progress=PROGRESS, total_steps=20, total_examples=320),
        ),
        ("agent-n0", end_s - 1.0, evaluated(job_id, PROGRESS, 0.96, True)),
        ("agent-n0", end_s - 1.0, exited(job_id, "n0", f"{job_id}-r")),
        ("scheduler", end_s - 1.0, changed(job_id, "running", "verifying")),
        (
            "agent-n0",
            end_s - 1.0,
            VerificationStarted(job_id=job_id, node="n0", replica=f"{job_id}-v", pid=1),
        ),
        ("agent-n0", end_s, verified(job_id, 0.96, 0.96)),
        ("agent-n0", end_s, exited(job_id, "n0", f"{job_id}-v")),
        ("scheduler", end_s, changed(job_id, "verifying", "completed")),
        ("scheduler", end_s, JobCompleted(job_id=job_id, verified=True, metric=0.96, progress=PROGRESS)),
    ]
    generations: list[GenerationStarted] = [
        generation(job_id, number, (N0,), state_from="scratch" if number == 1 else "survivor")
        for number in range(1, rescales + 2)
    ]
    told[1:1] = [("agent-n0", BEGIN_S, made) for made in generations]
    return [Happening(*happening) for happening in told]


def happenings(
    workload: str, policy: str, seed: int, jcts_s: Sequence[float], rescales: int = 0, application: str = ""
) -> list[Happening]:
    names = [f"job-{number}" for number in range(len(jcts_s))]
    application = application or "digits-cnn"
    first: list[Event] = [
        RunStarted(policy=policy, workload=workload, seed=seed, round_s=2.0, version="0"),
        joined("n0", max(len(names), 1)),
        *(JobSubmitted(spec=spec(name, application=application)) for name in names),
        decided(1, dict.fromkeys(names, (N0,))),
        *(changed(name, "pending", "starting") for name in names),
    ]
    lives = [h for name, jct_s in zip(names, jcts_s, strict=True) for h in life(name, jct_s, rescales)]
    begun = [Happening("scheduler", BEGIN_S, event) for event in first]
    last_s = BEGIN_S + max(jcts_s, default=0.0)
    ended = Happening("scheduler", last_s, RunEnded(reason="stopped"))
    return [*begun, *sorted(lives, key=lambda happening: happening.t_s), ended]


def put(
    place: Path,
    workload: str,
    policy: str,
    seed: int,
    jcts_s: Sequence[float],
    rescales: int = 0,
    **facts: object,
) -> Path:
    """A run's folder in `place`; with `facts` it has a run.json. Returns it."""
    folder = place / f"{workload}-{policy}-{seed}"
    save(written(happenings(workload, policy, seed, jcts_s, rescales), folder.name), folder)
    if facts:
        values = {"set": workload, "policy": policy, "seed": seed, "verified": True, "audit_clean": True}
        (folder / "run.json").write_text(json.dumps(values | facts))
    return folder
