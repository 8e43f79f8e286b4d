"""The scheduler's process around the core: agents, rounds, and replies to clients."""

import msgspec
import pytest

from common.config import LimitsConfig
from common.messaging.request_reply import ReplyServer
from common.protocol import (
    AgentLeft,
    CancelJob,
    Done,
    GetJobs,
    GetProfiles,
    GetRun,
    JobAccepted,
    JobCancelled,
    JobTable,
    Profiles,
    Refused,
    RegisterAgent,
    Registered,
    RoundDue,
    RunInfo,
    SubmitJob,
)
from common.types import JobProfile, JobState, Node
from services.scheduler.journal import read_journal
from tests.fixtures.scheduler_driver import make_node
from tests.fixtures.scheduler_rig import beat, join, spec

# --------------------------------------------------------------------------- agents


class TestAgents:
    def test_a_second_agent_with_the_same_name_waits_until_the_first_is_silent(self, rig):
        service = rig.start()
        assert isinstance(join(service), Registered)
        rig.now_s += 4.9
        refused = join(service, incarnation="second")
        assert isinstance(refused, Refused)
        assert "'a'" in refused.reason
        assert "4.9 s ago" in refused.reason
        assert beat(service) == Done()
        rig.now_s += 5.0
        assert isinstance(join(service, incarnation="second"), Registered)
        assert isinstance(beat(service), Refused)
        assert beat(service, incarnation="second") == Done()

    def test_an_agent_that_is_silent_for_too_long_counts_as_gone(self, rig):
        service = rig.start()
        join(service, "a")
        join(service, "b")
        for _ in range(11):
            rig.now_s += 0.5
            beat(service, "b")
            service.on_heartbeat_due()
        assert list(service.state.agents) == ["b"]
        (left,) = [event for event in rig.events() if isinstance(event, AgentLeft)]
        assert (left.node, left.reason) == ("a", "no heartbeat for too long")
        assert isinstance(beat(service, "a"), Refused)

    @pytest.mark.parametrize("heartbeat_s", [0.5, 4.0])
    def test_a_scheduler_that_stood_still_removes_no_agent(self, rig, heartbeat_s):
        timing = msgspec.structs.replace(rig.config.scheduler, heartbeat_s=heartbeat_s)
        service = rig.start(scheduler=timing)
        join(service, "a")
        rig.now_s += 60.0
        service.on_heartbeat_due()
        assert list(service.state.agents) == ["a"]
        for _ in range(int(5.0 / heartbeat_s) + 1):
            rig.now_s += heartbeat_s
            service.on_heartbeat_due()
        assert list(service.state.agents) == [], "the agent stays silent"

    def test_an_agent_of_a_resumed_run_gets_the_full_timeout(self, rig):
        join(rig.start())
        rig.kill()
        rig.now_s += 1000.0
        service = rig.start()
        rig.now_s += 0.5
        service.on_heartbeat_due()
        assert beat(service) == Done()

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("name", "../x\n"),
            ("name", "a\n"),
            ("name", ""),
            ("name", "x" * 65),
            ("slots", -1),
            ("slots", 4097),
            ("slot_speed", float("nan")),
            ("slot_speed", 0.0),
            ("slot_speed", 1.5),
            ("store_port", -1),
            ("store_port", 65_536),
        ],
    )
    def test_an_invalid_node_is_refused_and_not_journaled(self, rig, field, value):
        service = rig.start()
        node = msgspec.structs.replace(make_node("a", slots=4), **{field: value})
        reply = rig.ask(RegisterAgent(node=node, incarnation="first"))
        assert isinstance(reply, Refused)
        assert f"node.{field}" in reply.reason
        assert service.state.agents == {}
        assert list(read_journal(rig.run_dir)) == []

    def test_the_largest_valid_node_is_accepted(self, rig):
        service = rig.start()
        node = Node(name="x" * 64, slots=4096, slot_speed=1.0, store_port=65_535)
        assert isinstance(rig.ask(RegisterAgent(node=node, incarnation="i")), Registered)
        assert service.state.agents["x" * 64].node == node


# --------------------------------------------------------------------------- rounds


class TestRounds:
    def test_a_silent_collector_does_not_block_rounds(self, rig):
        service = rig.start()
        join(service)
        assert rig.ask(SubmitJob(spec=spec("job"))) == JobAccepted(job_id="job")
        rig.until(lambda: service.state.rounds)
        assert service.collector_silent
        assert service.state.jobs["job"].state is JobState.STARTING

    def test_a_round_uses_the_profiles_of_the_collector(self, rig):
        service = rig.start()
        asked = []

        def answer(request: GetProfiles) -> Profiles:
            asked.append(request)
            return Profiles(profiles=(JobProfile(job_id="job", progress=7.0),))

        ReplyServer(rig.reactor, rig.config.endpoints.collector_requests, answer)
        join(service)
        service.handle(SubmitJob(spec=spec("job")))
        rig.until(lambda: service.state.rounds)
        submitted = spec("job")
        assert asked[0] == GetProfiles(
            job_ids=("job",), applications=(submitted.application,), targets=(submitted.target,)
        )
        assert not service.collector_silent
        assert rig.ask(GetJobs()).jobs[0].progress == 7.0
        given = [type(entry.input) for entry in read_journal(rig.run_dir)]
        assert given == [RegisterAgent, SubmitJob, Profiles, RoundDue]

    def test_inputs_during_a_round_cause_one_more_round(self, rig):
        service = rig.start()
        join(service)
        service.handle(SubmitJob(spec=spec("one")))
        assert service.round_under_way
        service.handle(SubmitJob(spec=spec("two")))
        service.handle(SubmitJob(spec=spec("three")))
        rig.until(lambda: service.state.rounds == 2 and not service.round_under_way)
        assert [job.state for job in service.state.jobs.values()] == [JobState.STARTING] * 3


# --------------------------------------------------------------------------- clients


class TestClients:
    def test_a_job_table_has_all_active_jobs_and_the_newest_ended_ones(self, rig):
        service = rig.start()
        for number in range(6):
            service.handle(SubmitJob(spec=spec(f"job-{number}")))
        for number in (3, 0, 2, 5):
            service.handle(CancelJob(job_id=f"job-{number}"))
        active = ["job-1", "job-4"]
        for ended, expected in (
            (1000, ["job-3", "job-0", "job-2", "job-5"]),
            (4, ["job-3", "job-0", "job-2", "job-5"]),
            (2, ["job-2", "job-5"]),
            (0, []),
            (-1, []),
        ):
            table = service.handle(GetJobs(ended=ended))
            assert isinstance(table, JobTable)
            assert [row.id for row in table.jobs] == expected + active
            assert table.left_out == 4 - len(expected)

    def test_the_run_is_described_and_requests_for_other_services_are_refused(self, rig):
        service = rig.start()
        assert service.handle(GetRun()) == RunInfo(run_id="run", policy="fixed", seed=3)
        assert isinstance(service.handle(GetProfiles(job_ids=())), Refused)

    def test_events_beyond_the_configured_limits_are_not_published(self, rig):
        """The logger would refuse them forever."""
        service = rig.start(limits=LimitsConfig(message_bytes=1000))
        published = service.published
        with pytest.raises(ValueError, match="too large"):
            service.publish(JobCancelled(job_id="x" * 2000))
        assert service.published == published
