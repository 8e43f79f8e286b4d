"""The world of the OSDI'21 artifact, compared with the published results."""

import json
import math
import os
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from common.lifecycle import UserError
from common.types import batch_config
from services.scheduler.policies.registry import make_policy
from services.simulator.cases import make_nodes
from services.simulator.engine import Simulation, SimulationPlan
from services.simulator.perturbation import Perturbation
from services.simulator.results import Result
from services.simulator.run_case import simulate
from services.simulator.worlds.osdi21 import Osdi21World
from tests.fixtures.simulation_cases import case_of
from workloads.files.csv_table import read_table
from workloads.files.workload_file import Arrival, JobFields, complete_spec

ROOT = Path(__file__).parents[4]
PLACES = [
    *([Path(os.environ["COADAPT_OSDI21"])] if os.environ.get("COADAPT_OSDI21") else []),
    ROOT.parent / "shared" / "osdi21",
]
ARTIFACT = next((place for place in PLACES if (place / "traces").is_dir()), None)
needs_data = pytest.mark.skipif(
    ARTIFACT is None,
    reason="the data of the OSDI'21 artifact is neither in ../shared/osdi21 nor where COADAPT_OSDI21 says",
)
SIX = [f"workload-{number}" for number in range(1, 7)]
FOLDERS = {"1.0": "workloads", "2.0": "workloads-2.0"}


def replay(load: str, workload: str, policy: str) -> Result:
    assert ARTIFACT is not None
    path = ARTIFACT / FOLDERS[load] / f"{workload}.csv"
    return simulate(case_of("osdi21", label=workload, workload=path, policy=policy, traces=ARTIFACT))


def published(policy: str, load: str, workload: str) -> dict[str, object]:
    assert ARTIFACT is not None
    figures = json.loads((ARTIFACT / "published" / f"{policy}.json").read_text())
    return figures[load][workload]


@needs_data
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
@pytest.mark.parametrize(
    ("load", "workload"),
    [("1.0", workload) for workload in SIX] + [("2.0", f"workload-{number}") for number in range(1, 4)],
)
def test_every_completion_time_equals_the_published_one_to_the_second(
    policy: str, load: str, workload: str
) -> None:
    assert replay(load, workload, policy).jcts_s == published(policy, load, workload)["jcts_s"]


@cache
def pollux(workload: str) -> Result:
    return replay("1.0", workload, "pollux")


@needs_data
@pytest.mark.parametrize("workload", SIX)
def test_pollux_is_close_to_the_published_mean_of_each_workload(workload: str) -> None:
    result, figures = pollux(workload), published("pollux", "1.0", workload)
    assert result.mean_jct_s == pytest.approx(figures["mean_jct_s"], rel=0.03)
    assert set(result.jcts_s) == set(figures["jcts_s"])  # type: ignore[call-overload]
    assert result.value_over_bound is not None
    assert 0.99 < result.value_over_bound <= 1.0


@needs_data
def test_the_mean_of_pollux_over_all_workloads_is_within_1_5_percent_of_the_published_one() -> None:
    ours = fmean(pollux(workload).mean_jct_s or math.nan for workload in SIX)
    theirs = fmean(float(str(published("pollux", "1.0", w)["mean_jct_s"])) for w in SIX)
    assert ours == pytest.approx(theirs, rel=0.015)


@needs_data
def test_ordered_batch_sizes_are_split_as_in_the_artifact() -> None:
    """For all jobs of all workloads, and all numbers of replicas that the published policies can give."""
    assert ARTIFACT is not None
    world = Osdi21World(ARTIFACT / "traces", adapts=False)
    for path in sorted(ARTIFACT.glob("workloads*/*.csv")):
        for row in read_table(path, world.applications).rows:
            spec = world.add_job(row.spec)
            application = world.traces[spec.application]
            most = min(spec.max_replicas, spec.batch_size // spec.min_atomic_batch)
            for replicas in {*range(1, most + 1), spec.replicas}:
                ordered = batch_config(spec.batch_size, replicas, spec)
                split = application.split(spec.batch_size, replicas)
                assert application.ordered(ordered, replicas) == split


@needs_data
def test_interference_slows_jobs_that_span_nodes_and_share_one() -> None:
    assert ARTIFACT is not None
    ends_s = []
    for interference in (0.0, 0.5):
        world = Osdi21World(ARTIFACT / "traces", adapts=False, interference=interference)
        arrivals = []
        for name in ("a", "b"):
            fields = JobFields(application="cifar10", id=name, replicas=6, batch_size=2048)
            spec = complete_spec(fields, world.applications, name, 0)
            arrivals.append(Arrival(at_s=0.0, spec=world.add_job(spec)))
        plan = SimulationPlan(
            run_id="r", workload="w", arrivals=arrivals, nodes=make_nodes(3, 4), round_s=60.0, seed=0
        )
        run = Simulation(plan, world, make_policy("fixed"), lambda: 0.0).run()
        ends_s.append(run.state.ended["a"].ended_s)
    assert ends_s[1] == pytest.approx(60 + 30 + 2 * (ends_s[0] - 90), rel=0.03)


@needs_data
def test_perturbation_changes_what_policies_see_and_not_how_jobs_run() -> None:
    assert ARTIFACT is not None
    ends_s, profiles = [], []
    for errors in (Perturbation(), Perturbation(times=0.3, noise=2.0, seed=1)):
        world = Osdi21World(ARTIFACT / "traces", adapts=False, perturbation=errors)
        fields = JobFields(application="cifar10", id="a", replicas=2, batch_size=256)
        spec = world.add_job(complete_spec(fields, world.applications, "a", 0))
        arrivals = [Arrival(at_s=0.0, spec=spec)]
        plan = SimulationPlan(
            run_id="r", workload="w", arrivals=arrivals, nodes=make_nodes(1, 4), round_s=60.0, seed=0
        )
        run = Simulation(plan, world, make_policy("fixed"), lambda: 0.0).run()
        ends_s.append(run.state.ended["a"].ended_s)
        profiles += world.profiles(("a",))
    assert ends_s[0] == ends_s[1]
    true, seen = profiles
    assert true.statistics
    assert seen.statistics
    assert seen.statistics.var == 2.0 * true.statistics.var
    assert 0.7 <= seen.points[0].step_s / true.points[0].step_s <= 1.3
    assert seen.points[0].step_s != true.points[0].step_s


@needs_data
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda folder: (folder / "bert" / "scalability.csv").unlink(), "scalability.csv: cannot be read"),
        (
            lambda folder: (folder / "ncf" / "placements.csv").write_text("placement,local_bsz\n1,x\n"),
            "placements.csv: line 2: needs numbers",
        ),
        (
            lambda folder: (folder / "ncf" / "validation-256.csv").write_text(
                "progress,iteration,grad_sqr,grad_var\nnan,1,1,1\n"
            ),
            "needs rows of finite numbers",
        ),
        (
            lambda folder: (folder / "ncf" / "placements.csv").write_text(
                "placement,local_bsz,step_time,sync_time\n-11,32,1,0.5\n"
            ),
            "needs rows of finite numbers, none below 0",
        ),
        (
            lambda folder: [
                path.rename(path.with_name("validation-12x.csv"))
                for path in (folder / "bert").glob("validation-*.csv")
            ],
            "bert: no validation-<batch>.csv in it",
        ),
        (
            lambda folder: [path.unlink() for path in (folder / "yolov3").glob("validation-*.csv")],
            "no validation-<batch>.csv in it",
        ),
    ],
)
def test_the_error_names_the_file_that_is_broken_or_missing(tmp_path: Path, broken, complaint: str) -> None:
    assert ARTIFACT is not None
    for path in (ARTIFACT / "traces").rglob("*.csv"):
        copy = tmp_path / path.relative_to(ARTIFACT / "traces")
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    broken(tmp_path)
    with pytest.raises(UserError, match=complaint):
        Osdi21World(tmp_path, adapts=False)


@needs_data
def test_more_slots_per_node_than_were_measured_are_refused() -> None:
    assert ARTIFACT is not None
    with pytest.raises(UserError, match="slots 5: allowed in osdi21: 1 to 4"):
        Osdi21World(ARTIFACT / "traces", adapts=False, slots=5)
