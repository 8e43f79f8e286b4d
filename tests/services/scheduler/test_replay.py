"""Decisions depend only on the inputs of the core: replaying a journal gives them again, byte for byte."""

import pytest

from common.config import SchedulerConfig
from common.messaging.request_reply import ReplyServer
from common.protocol import (
    GenerationRunning,
    GetProfiles,
    JobSaved,
    Profiles,
    Report,
    RoundDecided,
    SubmitJob,
)
from common.types import JobProfile, JobState
from services.scheduler.policies.registry import BUILT_IN, make_policy
from services.scheduler.service import SchedulerService, make_core
from tests.fixtures.policy_views import profile
from tests.fixtures.scheduler_driver import Driver, make_node, make_spec
from tests.fixtures.scheduler_rig import Rig, decision_bytes, join, replayed, spec

LIVE = [name for name in BUILT_IN if not make_policy(name).needs_oracle]
ROUNDS = 8


def profile_after(job_id: str, rounds: int) -> JobProfile:
    """The profile that a collector would have after so many rounds."""
    number = int(job_id[-1])
    return profile(job_id, profiled=min(1 + rounds, 4), progress=20.0 * rounds / (1 + number), restart_s=2.0)


def answer_orders(service: SchedulerService, number: int) -> int:
    """Report as an agent that carries out its orders; the number of its last report."""
    for job in list(service.state.jobs.values()):
        fact: GenerationRunning | JobSaved
        if job.state is JobState.STARTING:
            fact = GenerationRunning(job_id=job.spec.id, generation=job.generation, progress=0.0)
        elif job.state is JobState.PREEMPTING:
            fact = JobSaved(job_id=job.spec.id, generation=job.generation, checkpoint="c", progress=1.0)
        else:
            continue
        number += 1
        service.handle(Report(node="a", incarnation="first", number=number, facts=(fact,)))
    return number


@pytest.mark.parametrize("policy", LIVE)
def test_replaying_the_journal_of_a_service_gives_its_decisions_again(rig: Rig, policy: str) -> None:
    """The slots are too few for all jobs, and jobs exceed the threshold of tiresias."""
    if policy == "tiresias":
        policy += ":threshold_slot_s=90"
    scheduler = SchedulerConfig(policy=policy, agent_timeout_s=1e6, round_s=1000.0)
    service = rig.start(scheduler=scheduler)
    assert rig.reactor

    def answer(request: GetProfiles) -> Profiles:
        known = request.job_ids[: service.state.rounds]
        return Profiles(profiles=tuple(profile_after(job_id, service.state.rounds) for job_id in known))

    ReplyServer(rig.reactor, rig.config.endpoints.collector_requests, answer)
    join(service)
    number = 0
    for arrival in range(ROUNDS):
        rig.now_s += 30.0
        if arrival < ROUNDS // 2:
            wanted = 1 + arrival % 3
            service.handle(SubmitJob(spec=spec(f"job-{arrival}", replicas=wanted, batch_size=64 * wanted)))
        service.want_round("interval")
        rig.until(lambda: not service.round_under_way)
        number = answer_orders(service, number)
    live = [decision_bytes(event) for event in rig.events() if isinstance(event, RoundDecided)]
    assert len(live) >= ROUNDS
    assert not service.collector_silent
    core = make_core(rig.config, make_policy(policy))
    assert replayed(core, rig.run_dir) == live


@pytest.mark.parametrize("policy", LIVE)
def test_the_order_of_agents_and_of_profiles_does_not_matter(policy: str) -> None:
    decisions = []
    for turn in (1, -1):
        driver = Driver(make_policy(policy))
        for name in "abc"[::turn]:
            driver.register(make_node(name, slots=4))
        for number in range(4):
            driver.submit(make_spec(f"job-{number}", replicas=2, batch_size=64))
        for rounds in range(1, 4):
            driver.now_s += 30.0
            profiles = [profile_after(f"job-{number}", rounds) for number in range(4)]
            driver.give(Profiles(profiles=tuple(profiles[::turn])))
            driver.round()
        decisions.append([decision_bytes(event) for event in driver.events(RoundDecided)])
    assert len(decisions[0]) == 3
    assert decisions[0] == decisions[1]
