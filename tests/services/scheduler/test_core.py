"""The scheduler's core, driven in memory."""

import pytest

from common.protocol import (
    AgentJoined,
    AgentLeft,
    CancelJob,
    Done,
    GenerationRunning,
    JobAccepted,
    JobCompleted,
    JobFailed,
    JobRaised,
    JobRefused,
    JobSaved,
    JobStateChanged,
    LeaveAgent,
    Profiles,
    Refused,
    RegisterAgent,
    Registered,
    ReplicaLost,
    RoundDecided,
    RoundDue,
    SubmitJob,
    TargetReached,
    VerificationDone,
    VerifierLost,
)
from common.types import JobConfig, JobProfile, JobState
from services.scheduler.commands import Answer, SendOrders, WantRound
from services.scheduler.state import orders_of
from tests.fixtures.scheduler_driver import LEAVE_TIMEOUT_S, Driver, make_node, make_spec, placed, run_job


def test_a_job_walks_from_submission_to_a_verified_completion(driver: Driver) -> None:
    run_job(driver, a=2)
    assert driver.job("job-1").state is JobState.RUNNING
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=50.0))
    assert driver.job("job-1").state is JobState.VERIFYING
    order = orders_of(driver.state)
    assert order.jobs == ()
    assert [v.checkpoint for v in order.verifications] == ["c"]
    driver.now_s = 77.0
    driver.fact(VerificationDone(job_id="job-1", metric=0.9))
    assert driver.state.jobs == {}
    assert driver.job("job-1").state is JobState.COMPLETED
    assert driver.job("job-1").ended_s == 77.0
    assert driver.events(JobCompleted)[0].verified
    walk = [event.new for event in driver.events(JobStateChanged)]
    assert walk == [JobState.STARTING, JobState.RUNNING, JobState.VERIFYING, JobState.COMPLETED]


def test_a_refuted_claim_is_a_failure(driver: Driver) -> None:
    run_job(driver)
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=50.0))
    driver.fact(VerificationDone(job_id="job-1", metric=0.5, findings=("metric is 0.5, reported 0.9",)))
    assert driver.job("job-1").state is JobState.FAILED
    assert "reported 0.9" in driver.events(JobFailed)[0].reason


def test_the_same_submission_again_is_accepted_once(driver: Driver) -> None:
    first = driver.submit(make_spec("job-1"))
    again = driver.submit(make_spec("job-1"))
    assert first == JobAccepted(job_id="job-1")
    assert again == JobAccepted(job_id="job-1", duplicate=True)
    assert len(driver.state.jobs) == 1


def test_an_id_in_use_with_another_specification_is_refused(driver: Driver) -> None:
    driver.submit(make_spec("job-1"))
    reply = driver.submit(make_spec("job-1", seed=9))
    assert isinstance(reply, Refused)
    assert "job-1" in reply.reason
    assert driver.events(JobRefused)[0].reason == reply.reason


def test_an_ended_job_keeps_its_id(driver: Driver) -> None:
    driver.submit(make_spec("job-1"))
    assert driver.give(CancelJob(job_id="job-1")) == Done()
    assert driver.submit(make_spec("job-1")) == JobAccepted(job_id="job-1", duplicate=True)
    assert isinstance(driver.submit(make_spec("job-1", seed=9)), Refused)
    assert driver.state.jobs == {}


def test_an_invalid_specification_is_refused(driver: Driver) -> None:
    reply = driver.submit(make_spec("job-1", replicas=9, max_replicas=16, batch_size=144))
    assert isinstance(reply, Refused)
    assert "replicas" in reply.reason
    assert driver.state.jobs == {}


def test_cancelling_an_unknown_or_ended_job_is_refused(driver: Driver) -> None:
    assert isinstance(driver.give(CancelJob(job_id="unknown")), Refused)
    driver.submit(make_spec("job-1"))
    driver.give(CancelJob(job_id="job-1"))
    assert isinstance(driver.give(CancelJob(job_id="job-1")), Refused)


def test_a_cancelled_job_leaves_the_orders_and_causes_a_round(driver: Driver) -> None:
    run_job(driver)
    driver.give(CancelJob(job_id="job-1"))
    assert orders_of(driver.state).jobs == ()
    assert any(isinstance(command, WantRound) for command in driver.commands)
    assert any(isinstance(command, SendOrders) for command in driver.commands)


def test_a_change_of_batch_alone_keeps_the_group(driver: Driver) -> None:
    run_job(driver, a=2)
    driver.policy.give("job-1", placed(a=2), JobConfig(atomic_batch=32))
    driver.round()
    order = orders_of(driver.state).jobs[0]
    assert (order.generation, order.group) == (2, 1)
    assert driver.job("job-1").restarts == 0


def test_another_allocation_forms_a_new_group(driver: Driver) -> None:
    run_job(driver, a=2)
    driver.policy.give("job-1", placed(a=1, b=2), JobConfig(atomic_batch=16))
    driver.round()
    order = orders_of(driver.state).jobs[0]
    assert (order.generation, order.group) == (2, 2)
    assert order.store_port == driver.state.agents["a"].node.store_port
    assert driver.job("job-1").restarts == 1


def test_an_unchanged_decision_changes_no_order(driver: Driver) -> None:
    run_job(driver, a=2)
    version = driver.state.orders_version
    driver.round()
    assert driver.state.orders_version == version


def test_a_preempted_job_saves_then_waits_then_resumes_from_its_checkpoint(driver: Driver) -> None:
    run_job(driver, a=2)
    driver.policy.give("job-1", (), None)
    driver.round()
    assert driver.job("job-1").state is JobState.PREEMPTING
    assert orders_of(driver.state).jobs[0].allocation == ()
    driver.fact(JobSaved(job_id="job-1", generation=2, checkpoint="c", progress=7.0))
    assert driver.job("job-1").state is JobState.PENDING
    driver.policy.give("job-1", placed(b=1), JobConfig(atomic_batch=16))
    driver.round()
    order = orders_of(driver.state).jobs[0]
    assert (order.generation, order.checkpoint) == (3, "c")


def test_a_preempting_job_that_dies_waits_for_slots_again(driver: Driver) -> None:
    run_job(driver, a=2)
    driver.policy.give("job-1", (), None)
    driver.round()
    driver.fact(ReplicaLost(job_id="job-1", generation=1, reason="about an earlier generation"))
    assert driver.job("job-1").state is JobState.PREEMPTING
    driver.fact(ReplicaLost(job_id="job-1", generation=2, reason="nothing of it was running"))
    assert driver.job("job-1").state is JobState.PENDING


def test_only_the_node_of_rank_0_can_strand_a_job_that_saves(driver: Driver) -> None:
    run_job(driver, a=1, b=1)
    driver.policy.give("job-1", (), None)
    driver.round()
    driver.fact(ReplicaLost(job_id="job-1", generation=2, reason="was ended by signal SIGKILL"), node="b")
    driver.silence("b")
    assert driver.job("job-1").state is JobState.PREEMPTING
    driver.fact(JobSaved(job_id="job-1", generation=2, checkpoint="c", progress=7.0))
    assert driver.job("job-1").checkpoint == "c"


def test_a_preempted_job_that_no_agent_confirms_as_saved_waits_for_slots_again(driver: Driver) -> None:
    run_job(driver, a=1)
    driver.policy.give("job-1", (), None)
    driver.round()
    driver.now_s += LEAVE_TIMEOUT_S
    driver.round()
    assert driver.job("job-1").state is JobState.PREEMPTING
    driver.now_s += 1.0
    driver.round()
    assert driver.job("job-1").state is JobState.PENDING


def test_a_save_of_an_earlier_generation_is_ignored(driver: Driver) -> None:
    run_job(driver, a=1)
    driver.policy.give("job-1", (), None)
    driver.round()
    driver.fact(JobSaved(job_id="job-1", generation=1, checkpoint="old", progress=1.0))
    assert driver.job("job-1").state is JobState.PREEMPTING


def test_a_first_step_of_an_earlier_generation_is_ignored(driver: Driver) -> None:
    driver.submit(make_spec("job-1"))
    driver.policy.give("job-1", placed(a=1), JobConfig(atomic_batch=16))
    driver.round()
    driver.policy.give("job-1", placed(a=2), JobConfig(atomic_batch=8))
    driver.round()
    driver.fact(GenerationRunning(job_id="job-1", generation=1, progress=0.0))
    assert driver.job("job-1").state is JobState.STARTING


@pytest.mark.parametrize("what", ["reached", "raised"])
def test_the_end_of_a_job_counts_even_if_its_node_was_unreachable(driver: Driver, what: str) -> None:
    """The agent keeps the fact while the scheduler counts it as gone, and reports it when it comes back."""
    run_job(driver, a=1)
    driver.silence("a")
    driver.register(make_node("a", slots=4))
    assert driver.job("job-1").state is JobState.PENDING
    if what == "reached":
        driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=5.0))
        assert driver.job("job-1").state is JobState.VERIFYING
        assert orders_of(driver.state).verifications[0].node == "a"
    else:
        driver.fact(JobRaised(job_id="job-1", generation=1, reason="ValueError: no"))
        assert driver.job("job-1").state is JobState.FAILED


def test_a_job_that_reaches_its_target_during_preemption_is_verified_in_a_free_slot(
    driver: Driver,
) -> None:
    run_job(driver, a=4)
    driver.submit(make_spec("job-2"))
    driver.policy.give("job-1", (), None)
    driver.policy.give("job-2", placed(a=4), JobConfig(atomic_batch=16))
    driver.round()
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=5.0))
    assert driver.job("job-1").allocation == placed(b=1)


def test_a_lost_verifier_is_replaced_a_limited_number_of_times(driver: Driver) -> None:
    run_job(driver, a=1)
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=5.0))
    driver.fact(VerifierLost(job_id="job-1", reason="an earlier verifier"), node="b")
    assert driver.job("job-1").failures == 0
    for _ in range(3):
        version = driver.state.orders_version
        driver.fact(VerifierLost(job_id="job-1", reason="ended by signal SIGKILL"))
        assert driver.job("job-1").state is JobState.VERIFYING
        assert driver.state.orders_version > version
    driver.fact(VerifierLost(job_id="job-1", reason="ended by signal SIGKILL"))
    assert driver.job("job-1").state is JobState.FAILED
    assert "could not be verified" in driver.events(JobFailed)[0].reason


def test_a_planned_leave_of_a_node_counts_as_no_failure(driver: Driver) -> None:
    run_job(driver, a=1, b=1)
    driver.give(LeaveAgent(node="b", incarnation="first"))
    assert driver.job("job-1").allocation == placed(a=1)
    assert driver.job("job-1").failures == 0
    driver.silence("a")
    assert driver.job("job-1").failures == 1


def test_an_ended_job_leaves_no_profile_behind(driver: Driver) -> None:
    run_job(driver, a=1)
    driver.give(Profiles(profiles=(JobProfile(job_id="job-1"),)))
    assert set(driver.state.profiles) == {"job-1"}
    driver.give(CancelJob(job_id="job-1"))
    assert driver.state.profiles == {}
    driver.give(Profiles(profiles=(JobProfile(job_id="job-1"),)))
    assert driver.state.profiles == {}, "the request was sent before the job ended"


def test_a_lost_replica_makes_the_others_form_a_new_group(driver: Driver) -> None:
    run_job(driver, a=2)
    driver.fact(ReplicaLost(job_id="job-1", generation=1, reason="was ended by signal SIGKILL"))
    order = orders_of(driver.state).jobs[0]
    assert (order.generation, order.group, order.allocation) == (2, 2, placed(a=2))
    driver.fact(ReplicaLost(job_id="job-1", generation=1, reason="its group failed"))
    assert orders_of(driver.state).jobs[0].generation == 2, "the fact is about an earlier generation"


def test_a_job_that_loses_replicas_too_often_fails(driver: Driver) -> None:
    run_job(driver)
    for generation in range(1, 5):
        driver.fact(ReplicaLost(job_id="job-1", generation=generation, reason="was ended by signal SIGKILL"))
    assert driver.job("job-1").state is JobState.FAILED
    assert "4 times" in driver.events(JobFailed)[0].reason


def test_a_job_that_raises_fails_and_frees_its_slots(driver: Driver) -> None:
    run_job(driver, a=4)
    driver.fact(JobRaised(job_id="job-1", generation=1, reason="ValueError: no", output_tail="tail"))
    assert driver.job("job-1").state is JobState.FAILED
    assert driver.events(JobFailed)[0].output_tail == "tail"
    run_job(driver, "job-2", a=4)
    assert driver.job("job-2").state is JobState.RUNNING


def test_a_lost_node_takes_only_its_own_replicas(driver: Driver) -> None:
    run_job(driver, a=2, b=2)
    driver.silence("b")
    job = driver.job("job-1")
    assert job.allocation == placed(a=2)
    assert job.config is not None
    assert job.config.total_batch(2) == 64, "the total batch stays"
    assert [event.node for event in driver.events(AgentLeft)] == ["b"]


def test_a_job_whose_nodes_are_all_lost_waits(driver: Driver) -> None:
    run_job(driver, b=2)
    driver.silence("b")
    assert driver.job("job-1").state is JobState.PENDING
    assert driver.job("job-1").allocation == ()


def test_a_lost_node_moves_a_verification(driver: Driver) -> None:
    run_job(driver, b=1)
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=5.0))
    driver.silence("b")
    assert orders_of(driver.state).verifications[0].node == "a"


def test_a_verification_without_any_node_waits_for_one(driver: Driver) -> None:
    run_job(driver, b=1)
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=5.0))
    driver.silence("a")
    driver.silence("b")
    assert orders_of(driver.state).verifications == ()
    driver.register(make_node("c", slots=1))
    assert orders_of(driver.state).verifications[0].node == "c"


def test_a_new_incarnation_of_a_node_means_its_replicas_are_gone(driver: Driver) -> None:
    run_job(driver, a=1)
    reply = driver.give(RegisterAgent(node=make_node("a", slots=4), incarnation="second"))
    assert isinstance(reply, Registered)
    assert driver.job("job-1").state is JobState.PENDING
    assert len(driver.events(AgentJoined)) == 3


def test_registering_twice_is_the_same_as_once(driver: Driver) -> None:
    run_job(driver, a=1)
    driver.register(make_node("a", slots=4))
    assert driver.job("job-1").state is JobState.RUNNING
    assert len(driver.events(AgentJoined)) == 2


def test_a_repeated_report_is_acted_on_once(driver: Driver) -> None:
    run_job(driver)
    fact = ReplicaLost(job_id="job-1", generation=1, reason="was ended by signal SIGKILL")
    driver.fact(fact, number=100)
    driver.fact(ReplicaLost(job_id="job-1", generation=2, reason="late copy"), number=100)
    assert driver.job("job-1").failures == 1


def test_a_report_of_an_unregistered_agent_is_refused(driver: Driver) -> None:
    run_job(driver)
    driver.silence("a")
    fact = JobRaised(job_id="job-1", generation=1, reason="x")
    assert isinstance(driver.fact(fact), Refused)


def test_attained_service_counts_slots_and_time(driver: Driver) -> None:
    run_job(driver, a=2)
    driver.now_s += 10.0
    driver.policy.give("job-1", placed(a=4), JobConfig(atomic_batch=16))
    driver.round()
    driver.now_s += 5.0
    driver.round()
    view = driver.policy.views[-1].jobs[0]
    assert (view.run_s, view.attained_slot_s) == (15.0, 40.0)


def test_a_job_under_verification_holds_one_slot(driver: Driver) -> None:
    run_job(driver, a=4)
    driver.fact(TargetReached(job_id="job-1", generation=1, checkpoint="c", metric=0.9, progress=5.0))
    driver.submit(make_spec("job-2"))
    driver.round()
    assert [(node.name, node.slots) for node in driver.policy.views[-1].nodes] == [("a", 3), ("b", 4)]


def test_a_round_without_jobs_decides_nothing(driver: Driver) -> None:
    driver.give(RoundDue(trigger="interval"))
    assert driver.events(RoundDecided) == []


def test_a_step_does_not_change_the_state_it_gets(driver: Driver) -> None:
    before = driver.state
    driver.submit(make_spec("job-1"))
    assert before.jobs == {}
    core, request = driver.core, SubmitJob(spec=make_spec("job-2"))
    one, commands = core.step(driver.state, request, 5.0)
    two, again = core.step(driver.state, request, 5.0)
    assert (one, commands) == (two, again)
    assert any(isinstance(command, Answer) for command in commands)
