"""tiresias, optimus and srtf: what they give in views that a person can check, and their parameters."""

import msgpack
import pytest
from msgspec import structs

from common.types import GradientStatistics, replicas_of
from services.scheduler.policies import UnknownPolicy, make_live_policy, make_policy
from services.scheduler.policies.interface import ClusterView, Decision, JobView
from services.scheduler.policies.optimus import OptimusPolicy, divide
from services.scheduler.policies.placement import keep_or_take_freest
from services.scheduler.policies.srtf import SrtfPolicy, remaining_s
from services.scheduler.policies.tiresias import TiresiasPolicy
from tests.fixtures.policy_views import CLEAN, NOISY, apply, at, job, nodes, profile, view


def counts(decision: Decision) -> dict[str, int]:
    return {name: replicas_of(allocation) for name, allocation in decision.allocations.items()}


# ------------------------------------------------------------------------------ placement


def test_whoever_keeps_its_count_stays_and_the_others_take_from_the_freest_nodes() -> None:
    present = [at((1, 2)), at((2, 1)), (), ()]
    placed = keep_or_take_freest([2, 3, 4, 1], present, nodes(4, 4, 4), order=[3, 1, 2, 0])
    assert placed == [at((1, 2)), at((3, 3)), at((2, 3), (1, 1)), at((2, 1))]


# ------------------------------------------------------------------------------ tiresias


class Tiresias:
    """A policy and its memory, which goes through msgpack as it does in a run."""

    def __init__(self, threshold_slot_s: float = 100.0) -> None:
        self.policy = TiresiasPolicy(threshold_slot_s)
        self.memory: object = None

    def decide(self, given: ClusterView) -> Decision:
        decision = self.policy.decide(given, self.memory, seed=0)
        self.memory = msgpack.unpackb(msgpack.packb(decision.memory))
        return decision


def test_tiresias_lets_those_that_used_little_go_first_whoever_came_first() -> None:
    old = job("old", at((1, 4)), replicas=4, attained_slot_s=100.0)
    new = job("new", replicas=6, attained_slot_s=99.0)
    decision = Tiresias().decide(view(old, new))
    assert counts(decision) == {"old": 0, "new": 6}
    assert decision.reasons["new"] == (
        "6 replicas on node-1 (4) and node-2 (2), batch 66: first queue, 99 of 100 slot-seconds used"
    )
    assert decision.reasons["old"] == (
        "waits in the second queue: 4 replicas asked for, 2 slots left by those before it"
    )


def test_tiresias_lets_a_job_that_fits_overtake_one_that_does_not() -> None:
    decision = Tiresias().decide(view(job("a", replicas=6), job("b", replicas=4), job("c", replicas=2)))
    assert counts(decision) == {"a": 6, "b": 0, "c": 2}


def test_tiresias_keeps_the_second_queue_in_the_order_in_which_jobs_came_into_it() -> None:
    tiresias = Tiresias()
    tiresias.decide(view(job("a", replicas=8), job("b", replicas=8, attained_slot_s=150.0)))
    decision = tiresias.decide(
        view(job("a", replicas=8, attained_slot_s=120.0), job("b", replicas=8, attained_slot_s=150.0))
    )
    assert counts(decision) == {"a": 0, "b": 8}


def test_tiresias_remembers_the_place_of_a_job_that_is_away_saving_but_not_of_one_that_ended() -> None:
    tiresias = Tiresias()
    a, b = (job(name, replicas=8, attained_slot_s=150.0) for name in "ab")
    tiresias.decide(view(a, b))
    assert counts(tiresias.decide(view(b, now_s=101.0))) == {"b": 8}
    assert counts(tiresias.decide(view(a, b, now_s=102.0))) == {"a": 8, "b": 0}
    tiresias.decide(view(b, now_s=10_000.0))
    assert [job_id for job_id, _ in tiresias.memory] == ["b"]  # type: ignore[attr-defined]


def test_tiresias_says_when_a_job_asks_for_more_than_there_is() -> None:
    decision = Tiresias().decide(view(job("a", replicas=8), job("b", replicas=2), on=nodes(4)))
    assert counts(decision) == {"a": 0, "b": 2}
    assert decision.reasons["a"] == "waits: 8 replicas asked for, the cluster has 4 slots"


def test_tiresias_places_a_job_anew_whose_node_is_gone_or_whose_slot_a_verifier_took() -> None:
    lost, squeezed = job("a", at((3, 2)), replicas=2), job("b", at((1, 4)), replicas=4)
    decision = Tiresias().decide(view(lost, squeezed, on=nodes(3, 4)))
    assert decision.allocations == {"a": at((2, 2)), "b": at((1, 3), (2, 1))}


# ------------------------------------------------------------------------------ optimus


class Table:
    """An oracle of given step times by replicas, the last one for all more."""

    def __init__(self, times_s: dict[str, tuple[float, ...]], steps: dict[str, float]) -> None:
        self.times_s = times_s
        self.steps = steps

    def step_time_s(self, job_id: str, replicas: int) -> float:
        times_s = self.times_s[job_id]
        return times_s[min(replicas, len(times_s)) - 1]

    def remaining_steps(self, job_id: str) -> float:
        return self.steps[job_id]


def jobs(*names: str) -> tuple[JobView, ...]:
    return tuple(job(name) for name in names)


def test_optimus_gives_each_slot_where_it_saves_most_time() -> None:
    oracle = Table({"a": (4.0, 2.0, 1.5, 1.4), "b": (4.0, 3.0, 2.9)}, {"a": 10.0, "b": 10.0})
    assert divide(jobs("a", "b"), 3, oracle) == [2, 1]
    assert divide(jobs("a", "b"), 4, oracle) == [2, 2]
    assert divide(jobs("a", "b"), 5, oracle) == [3, 2]


def test_optimus_weighs_by_what_is_left_and_prefers_the_first_on_ties() -> None:
    times_s = {"a": (4.0, 3.0), "b": (4.0, 3.0)}
    assert divide(jobs("a", "b"), 3, Table(times_s, {"a": 10.0, "b": 10.0})) == [2, 1]
    assert divide(jobs("a", "b"), 3, Table(times_s, {"a": 10.0, "b": 11.0})) == [1, 2]


def test_optimus_leaves_slots_free_that_would_gain_nobody_anything() -> None:
    oracle = Table({"a": (2.0, 2.5, 1.0)}, {"a": 10.0})
    assert divide(jobs("a"), 8, oracle) == [1]


def test_optimus_gives_one_each_in_order_where_slots_are_short() -> None:
    names = ("a", "b", "c")
    oracle = Table(dict.fromkeys(names, (2.0, 1.0)), dict.fromkeys(names, 5.0))
    given = view(*jobs(*names), on=nodes(1, 1))
    decision = OptimusPolicy().decide(
        ClusterView(now_s=0.0, nodes=given.nodes, jobs=given.jobs, restart_penalty_s=1.0, oracle=oracle),
        None,
        seed=0,
    )
    assert counts(decision) == {"a": 1, "b": 1, "c": 0}
    assert decision.reasons["b"] == "1 replica on node-2, batch 64: 10 s of training left on them"
    assert decision.reasons["c"] == "waits: 2 slots, one each for the jobs before it"


def test_optimus_is_for_simulators_only_and_says_so() -> None:
    assert make_policy("optimus").name == "optimus"
    with pytest.raises(UnknownPolicy, match=r"goes by the true step times .* only a simulator knows"):
        make_live_policy("optimus")
    assert make_live_policy("srtf").name == "srtf"
    with pytest.raises(ValueError, match="needs the oracle of a simulator"):
        OptimusPolicy().decide(view(job("a")), None, seed=0)


# ------------------------------------------------------------------------------ srtf


def known(name: str, progress: float, statistics: GradientStatistics = CLEAN, **changes: object) -> JobView:
    done = profile(name, statistics=statistics, progress=progress)
    return job(name, profile=done, **changes)


def test_srtf_runs_the_job_with_least_left_and_others_where_they_fit() -> None:
    long, short = known("long", 100.0, replicas=6), known("short", 900.0, replicas=6)
    middle = known("middle", 500.0, replicas=2)
    decision = SrtfPolicy().decide(view(long, middle, short), None, seed=0)
    assert counts(decision) == {"long": 0, "middle": 2, "short": 6}
    assert "s to its declared progress" in decision.reasons["short"]
    assert decision.reasons["long"].endswith("6 replicas asked for, 0 slots left by those before it")


def test_srtf_measures_first_whom_it_cannot_estimate_and_says_so() -> None:
    decision = SrtfPolicy().decide(view(known("a", 999.0, replicas=8), job("b", replicas=4)), None, seed=0)
    assert counts(decision) == {"a": 0, "b": 4}
    assert "cannot be estimated" in decision.reasons["b"]


def test_the_estimate_is_the_remaining_progress_at_the_modelled_goodput() -> None:
    running = known("a", 400.0, allocation=at((1, 2)), replicas=2, batch_size=64)
    seconds = 0.01 + 32 * 0.002
    step_s = (seconds**1.5 + 0.005**1.5) ** (1 / 1.5)  # within one node
    gain = (0.05 + 1) / (0.05 / 4 + 1)
    expected_s = (1000.0 - 400.0) / gain * step_s
    assert remaining_s(running, 4, 1.0) == pytest.approx(expected_s)
    waiting = known("a", 400.0, replicas=2, batch_size=64)
    assert remaining_s(waiting, 4, 1.0) == pytest.approx(expected_s + 0.1), "its restart comes on top"
    overrun = known("a", 2000.0, allocation=at((1, 2)))
    assert remaining_s(overrun, 4, 1.0) == 0.0


def test_srtf_takes_a_larger_batch_for_worth_nothing_until_statistics_are_trusted() -> None:
    vague = GradientStatistics(sqr=1e-9, var=1e9, trusted=False)
    trusted, untrusted = known("a", 0.0, NOISY, batch_size=256), known("a", 0.0, vague, batch_size=256)
    assert remaining_s(untrusted, 4, 1.0) > 3 * remaining_s(trusted, 4, 1.0)  # type: ignore[operator]
    reason = SrtfPolicy().decide(view(untrusted), None, seed=0).reasons["a"]
    assert reason.endswith("at most: its gradient statistics do not tell yet what its larger batch is worth")


def test_under_srtf_two_equal_jobs_do_not_take_turns() -> None:
    a, b = known("a", 500.0, replicas=8), known("b", 500.5, replicas=8)
    first = SrtfPolicy().decide(view(a, b), None, seed=0)
    assert counts(first) == {"a": 0, "b": 8}
    running = apply(first, view(a, b))
    ahead = known("a", 500.6, replicas=8)
    after = ClusterView(
        now_s=101.0, nodes=running.nodes, jobs=(ahead, running.jobs[1]), restart_penalty_s=1.0
    )
    assert counts(SrtfPolicy().decide(after, None, seed=0)) == {"a": 0, "b": 8}


def test_under_srtf_a_job_that_is_spread_out_does_not_swap_with_an_equal_one_for_ever() -> None:
    ones = [known(name, 990.0, allocation=at((n, 1)), replicas=1) for n, name in enumerate("xy", start=1)]
    a, b = (known(name, 500.0, replicas=2) for name in "ab")
    present = view(*ones, structs.replace(a, allocation=at((1, 1), (2, 1))), b, on=nodes(2, 2))
    for _ in range(4):
        decision = SrtfPolicy().decide(present, None, seed=0)
        assert counts(decision) == {"x": 1, "y": 1, "a": 2, "b": 0}
        present = apply(decision, present)


# ------------------------------------------------------------------------------ parameters of policies


def test_numbers_after_a_name_are_parameters_of_the_policy() -> None:
    tiresias = make_policy("tiresias:threshold_slot_s=120")
    assert isinstance(tiresias, TiresiasPolicy)
    assert tiresias.name == "tiresias"
    assert tiresias.threshold_slot_s == 120.0
    pollux = make_policy("pollux:power=0,avoid_interference=false")
    assert (pollux.power, pollux.avoid_interference) == (0.0, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tiresias:threshold=1", "'threshold': no such parameter; allowed: threshold_slot_s"),
        ("tiresias:threshold_slot_s=soon", "threshold_slot_s 'soon': allowed: float"),
        ("tiresias:threshold_slot_s=-1", "threshold_slot_s -1.0: allowed: finite slot-seconds above 0"),
        ("tiresias:threshold_slot_s=nan", "threshold_slot_s nan: allowed: finite slot-seconds above 0"),
        ("coadapt:delta=inf", "delta inf: allowed: -1 to 1"),
        ("pollux:power=-5", "power -5.0: allowed: 0, and 0.01 to 4 of either sign"),
        ("pollux:power=1e-9", "power 1e-09: allowed: 0, and 0.01 to 4 of either sign"),
        ("fixed:speed=2", "'speed': no such parameter; allowed: none"),
        (
            "pollux:name=3",
            "'name': no such parameter; allowed: power, avoid_interference, by_goodput, adapt_",
        ),
    ],
)
def test_a_parameter_that_is_not_there_or_not_allowed_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UnknownPolicy) as raised:
        make_policy(text)
    assert str(raised.value).startswith(f"policy {text!r}: {complaint}")
