import math
import statistics
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from common.goodput.model import gain
from common.lifecycle import UserError
from common.types import JobSpec, batch_config
from tests.fixtures.profiles import write_profiles
from workloads.applications import applications
from workloads.files.generate import (
    DECLARED,
    HABIT,
    RECIPES,
    REQUESTS,
    generate,
    needs_of,
    target_of,
    to_toml,
)
from workloads.files.measured_profile import PROFILES, MeasuredProfile, read_profiles
from workloads.files.tuned_requests import (
    LEAST_OF_LINEAR,
    MOST_OF_LINEAR,
    slot_seconds,
    speedups_of,
    tuned_request,
)
from workloads.files.workload_file import JobFields, Workload, complete_spec, read_workload

NODES, SLOTS = 2, 4
SETS = Path(PROFILES).parent / "sets"
REGENERATE = "coadapt workload generate --set all --requests all --seed 1 --out workloads/sets --overwrite"
EVERY_SET = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory) -> dict[str, MeasuredProfile]:
    return read_profiles(write_profiles(tmp_path_factory.mktemp("profiles")), applications())


@pytest.fixture(scope="module")
def made(profiles):
    """A workload set; each is generated once."""
    known: dict[tuple[str, str, int], Workload] = {}

    def make(name: str, requests: str = "tuned", seed: int = 1) -> Workload:
        if (name, requests, seed) not in known:
            known[name, requests, seed] = generate(RECIPES[name], requests, seed, profiles, NODES, SLOTS)
        return known[name, requests, seed]

    return make


def job(profiles: dict[str, MeasuredProfile], name: str) -> JobSpec:
    return complete_spec(JobFields(application=name), {name: profiles[name].spec}, name, 0)


def test_the_committed_sets_are_what_the_committed_profiles_make() -> None:
    measured = read_profiles(PROFILES, applications())
    texts = {
        f"{name}-{requests}.toml": to_toml(generate(recipe, requests, 1, measured, NODES, SLOTS))
        for name, recipe in RECIPES.items()
        for requests in REQUESTS
    }
    stale = [file for file, text in texts.items() if (SETS / file).read_text(encoding="utf-8") != text]
    assert not stale, f"profiles or recipes have changed; make the sets anew: {REGENERATE}"


@EVERY_SET
@pytest.mark.parametrize("requests", REQUESTS)
def test_a_set_is_a_workload_file_whose_jobs_all_fit_the_cluster(made, name, requests, tmp_path) -> None:
    workload = made(name, requests)
    path = tmp_path / "set.toml"
    path.write_text(to_toml(workload), encoding="utf-8")
    assert read_workload(path, applications(), NODES * SLOTS) == workload
    assert workload.name == f"{name}-{requests}"


@EVERY_SET
def test_a_set_has_12_to_24_jobs_spread_evenly_over_four_applications(made, name) -> None:
    jobs = Counter(row.spec.application for row in made(name).rows)
    assert jobs.keys() == applications().keys()
    assert 12 <= jobs.total() <= 24
    assert max(jobs.values()) - min(jobs.values()) <= 1


@EVERY_SET
def test_tuned_and_realistic_sets_differ_only_in_requests(made, name) -> None:
    def others(workload: Workload) -> list[object]:
        return [
            structs.replace(row, spec=structs.replace(row.spec, replicas=1, batch_size=1))
            for row in workload.rows
        ]

    assert others(made(name, "tuned")) == others(made(name, "realistic"))


@EVERY_SET
def test_a_seed_decides_everything_in_a_set(made, profiles, name) -> None:
    again = generate(RECIPES[name], "realistic", 1, profiles, NODES, SLOTS)
    assert again == made(name, "realistic")
    other = made(name, "realistic", 2)
    assert [row.spec.target for row in other.rows] != [row.spec.target for row in made(name).rows]
    seeds = {row.spec.seed for row in (*other.rows, *made(name).rows)}
    assert len(seeds) == 2 * len(other.rows)


def window_s(workload: Workload, profiles: dict[str, MeasuredProfile], load: float) -> float:
    work_s = sum(slot_seconds(profiles[row.spec.application], row.spec) for row in workload.rows)
    return work_s / (NODES * SLOTS * load)


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].load])
def test_arrivals_come_within_the_window_that_makes_the_load(made, profiles, name) -> None:
    for seed in range(1, 4):
        workload = made(name, "realistic", seed)
        at_s = [row.at_s for row in workload.rows]
        window = window_s(workload, profiles, RECIPES[name].load)
        assert 0.5 * window < at_s[-1] <= window
        assert at_s == sorted(at_s)


def test_in_a_burst_all_jobs_arrive_at_once(made) -> None:
    assert {row.at_s for row in made("burst").rows} == {0.0}


def test_a_day_has_two_peaks_and_a_quiet_night(made, profiles) -> None:
    hours: list[float] = []
    for seed in range(12):
        workload = made("diurnal", "realistic", seed)
        window = window_s(workload, profiles, RECIPES["diurnal"].load)
        hours += [24 * row.at_s / window for row in workload.rows]
    morning, noon, afternoon, night = np.histogram(hours, bins=[3, 6, 9, 12, 18, 24])[0][[0, 1, 2, 4]]
    assert morning > noon < afternoon
    assert night / 6 < 0.25 * noon / 3


def test_few_jobs_of_a_tail_are_long(made, profiles) -> None:
    rows = made("tail").rows
    work_s = sorted(slot_seconds(profiles[row.spec.application], row.spec) for row in rows)
    assert np.mean(work_s[-4:]) > 2 * np.median(work_s[:-4])


def test_an_ideally_tuned_job_is_at_50_to_80_percent_of_the_ideal_speedup(profiles) -> None:
    measured, spec = profiles["matfac"], job(profiles, "matfac")
    parts = {n: speedup / n for n, speedup in speedups_of(measured, spec, NODES, SLOTS).items()}
    valid = {n for n, part in parts.items() if LEAST_OF_LINEAR <= part <= MOST_OF_LINEAR}
    assert 1 < len(valid) < NODES * SLOTS
    random = np.random.default_rng(1)
    drawn = Counter(tuned_request(measured, spec, NODES, SLOTS, random)[0] for _ in range(30 * len(valid)))
    assert drawn.keys() == valid
    assert min(drawn.values()) > 15


@pytest.mark.parametrize("name", applications())
def test_an_ideally_tuned_batch_makes_the_most_goodput_of_its_replicas(profiles, name) -> None:
    measured, spec = profiles[name], job(profiles, name)
    middle = measured.needed_progress(spec.min_batch_size, spec.target) / 2

    def goodput(total: int, replicas: int) -> float:
        config = batch_config(total, replicas, spec)
        batch = config.total_batch(replicas)
        steps = gain(measured.statistics(batch, middle), batch / spec.min_batch_size)
        return float(steps) / measured.step_s((replicas,), config.atomic_batch, config.accumulation)

    replicas, batch = tuned_request(measured, spec, 1, SLOTS, np.random.default_rng(1))
    best = max(goodput(total, replicas) for total in range(spec.min_batch_size, spec.max_batch_size + 1))
    assert goodput(batch, replicas) > 0.99 * best


class Scaled(MeasuredProfile):
    """As measured, but with several replicas a step takes `times` as long as with one replica and the same
    atomic batch."""

    def __init__(self, measured: MeasuredProfile, of_one: float) -> None:
        self.__dict__.update(measured.__dict__)
        self.of_one = of_one

    def step_s(self, placement: tuple[int, ...], atomic: int, accumulation: int) -> float:
        alone_s = super().step_s((1,), atomic, accumulation)
        return alone_s if placement == (1,) else self.of_one * alone_s


def test_if_no_number_of_replicas_is_well_chosen_the_nearest_is_requested(profiles) -> None:
    spec = job(profiles, "matfac")
    dear = Scaled(profiles["matfac"], of_one=20.0)
    assert max(speedups_of(dear, spec, NODES, SLOTS).values()) == 1.0
    assert tuned_request(dear, spec, NODES, SLOTS, np.random.default_rng(1))[0] == 1
    free = Scaled(profiles["matfac"], of_one=0.9)
    parts = {n: speedup / n for n, speedup in speedups_of(free, spec, NODES, SLOTS).items()}
    assert min(parts.values()) > MOST_OF_LINEAR
    assert tuned_request(free, spec, NODES, SLOTS, np.random.default_rng(1))[0] == min(parts, key=parts.get)


@EVERY_SET
def test_realistic_users_request_a_power_of_two_and_the_initial_batch(made, name) -> None:
    specs = [row.spec for row in made(name, "realistic").rows]
    assert {spec.replicas for spec in specs} <= HABIT.keys()
    assert sum(spec.replicas <= 2 for spec in specs) > len(specs) / 2
    for spec in specs:
        assert spec.batch_size == max(spec.min_batch_size, spec.replicas * spec.min_atomic_batch)


@EVERY_SET
def test_lengths_are_set_by_targets_within_what_their_application_allows(made, profiles, name) -> None:
    for row in made(name).rows:
        measured = profiles[row.spec.application]
        assert measured.spec.target_min <= row.spec.target <= measured.spec.target_max
        needs = [measured.needed_progress(batch, row.spec.target) for batch in measured.batches]
        assert 0 < min(needs) <= max(needs) < measured.spec.max_progress
        least, most = DECLARED
        assert least <= row.spec.max_progress / statistics.median(needs) <= most


def test_the_target_is_the_one_whose_need_is_nearest_by_ratio() -> None:
    needs = {0.5: 100.0, 0.6: 200.0, 0.7: 400.0}
    assert [target_of(needs, wanted) for wanted in (10.0, 150.0, 300.0, 1000.0)] == [0.5, 0.6, 0.7, 0.7]


def test_targets_that_some_batch_sizes_reach_much_later_or_never_are_left_out(profiles) -> None:
    measured = profiles["mnist1d-conv"]

    class Chance(MeasuredProfile):
        def __init__(self) -> None:
            self.__dict__.update(measured.__dict__)

        def needed_progress(self, batch: int, target: float) -> float:
            need = super().needed_progress(batch, target)
            late = 3 if target > 0.75 else 1
            return need * late if batch == 64 else need

    assert max(needs_of(measured)) > 0.75 >= max(needs_of(Chance()))


def test_a_profile_that_never_reaches_its_own_target_is_named(profiles) -> None:
    class Hopeless(MeasuredProfile):
        def __init__(self, measured: MeasuredProfile) -> None:
            self.__dict__.update(measured.__dict__)

        def needed_progress(self, batch: int, target: float) -> float:
            return math.inf

    broken = {**profiles, "char-lm": Hopeless(profiles["char-lm"])}
    with pytest.raises(UserError, match=r"char-lm: .*target 2\.8.*calibrate"):
        generate(RECIPES["burst"], "tuned", 1, broken, NODES, SLOTS)


def test_a_file_says_how_it_was_made(made) -> None:
    text = to_toml(made("tail", "realistic"))
    assert "coadapt workload generate --set tail --requests realistic --seed 1" in text.splitlines()[0]
    assert msgspec.toml.decode(text)["name"] == "tail-realistic"
