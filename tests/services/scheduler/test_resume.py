"""A scheduler that restarts in the middle of a run, wherever the previous one was killed."""

import msgpack
import msgspec
import pytest

from common.config import ApplicationsConfig, RunConfig, SchedulerConfig
from common.eventlog import EVENTS_FILE, EventLogWriter
from common.lifecycle import UserError
from common.protocol import (
    Done,
    Event,
    EventRecord,
    GenerationRunning,
    JobAccepted,
    JobRaised,
    JobSubmitted,
    LeaveAgent,
    Report,
    RoundDecided,
    RoundDue,
    RunEnded,
    RunStarted,
    SubmitJob,
)
from services.scheduler.resume import published_events
from services.scheduler.service import SchedulerService
from tests.fixtures.scheduler_rig import Rig, beat, join, spec


class Killed(BaseException):
    """Stands for the end of the process."""


def timeless(events: list[Event]) -> list[Event]:
    """The events without measured durations."""
    return [
        msgspec.structs.replace(event, decision_s=0.0) if isinstance(event, RoundDecided) else event
        for event in events
    ]


def act(service: SchedulerService) -> None:
    """Some inputs of a run; the last one causes several events."""
    join(service)
    service.handle(SubmitJob(spec=spec("one")))
    service.handle(SubmitJob(spec=spec("two", replicas=2, batch_size=32)))
    service.on_bad_message("unknown bytes")
    service.feed(RoundDue(trigger="interval"))


EVENTS_OF_THE_ROUND = 3


class TestRestart:
    def test_a_restarted_scheduler_has_the_same_state(self, rig):
        service = rig.start()
        act(service)
        running = GenerationRunning(job_id="one", generation=1, progress=0.0)
        service.handle(Report(node="a", incarnation="first", number=1, facts=(running,)))
        raised = JobRaised(job_id="two", generation=1, reason="ValueError: no")
        service.handle(Report(node="a", incarnation="first", number=2, facts=(raised,)))
        former = service.state
        rig.kill()
        rig.now_s += 10.0
        service = rig.start()
        assert service.state == former
        assert beat(service) == Done()
        again = service.handle(SubmitJob(spec=spec("one")))
        assert again == JobAccepted(job_id="one", duplicate=True)

    @pytest.mark.parametrize("logged", ["nothing", "some", "all"])
    @pytest.mark.parametrize("published", range(EVENTS_OF_THE_ROUND + 1))
    def test_no_event_is_lost_or_repeated_wherever_it_is_killed(self, rig, published, logged):
        act(rig.start())
        whole = timeless(rig.events())
        first_of_round = next(i for i, event in enumerate(whole) if isinstance(event, RoundDecided))
        assert len(whole) == first_of_round + EVENTS_OF_THE_ROUND
        rig.kill()
        for file in [*rig.run_dir.rglob("*.msgpack"), rig.run_dir / "config.json"]:
            file.unlink()

        service = rig.start()
        kill_after(service, first_of_round + published)
        if published < EVENTS_OF_THE_ROUND:
            with pytest.raises(Killed):
                act(service)
        else:
            act(service)
        rig.kill()
        before = rig.events()
        assert timeless(before) == whole[: first_of_round + published]
        count = {"nothing": 0, "some": 3, "all": len(before)}[logged]
        rig.move_to_log(count)
        assert published_events(rig.run_dir) == len(before)

        service = rig.start()
        assert timeless(before[:count] + rig.events()) == [*whole, started(rig)]
        assert service.published == len(whole) + 1

    def test_the_next_restart_completes_one_that_was_killed(self, rig, monkeypatch):
        act(rig.start())
        whole = timeless(rig.events())
        rig.kill()
        cut_last_records(rig, EVENTS_OF_THE_ROUND)
        publish = SchedulerService.publish
        for survived in range(1, EVENTS_OF_THE_ROUND + 1):
            expected = len(whole) - EVENTS_OF_THE_ROUND + survived

            def limited(service: SchedulerService, event: Event, total: int = expected) -> None:
                if service.published >= total:
                    rig.service = service
                    raise Killed
                publish(service, event)

            monkeypatch.setattr(SchedulerService, "publish", limited)
            with pytest.raises(Killed):
                rig.start()
            rig.kill()
            assert timeless(rig.events()) == whole[:expected]
        monkeypatch.setattr(SchedulerService, "publish", publish)
        rig.start()
        assert timeless(rig.events()) == [*whole, started(rig)]

    def test_a_run_that_was_stopped_can_be_resumed(self, rig):
        service = rig.start()
        act(service)
        service.handle(LeaveAgent(node="a", incarnation="first"))
        assert service.round_under_way
        service.close("stopped")
        rig.close()
        before = rig.events()
        assert before[-1] == RunEnded(reason="stopped", active=("one", "two")), (
            "even while a round is under way"
        )
        rig.start()
        assert rig.events() == [*before, started(rig)]

    def test_a_run_whose_scheduler_was_killed_before_its_first_input_can_be_resumed(self, rig):
        rig.start()
        rig.kill()
        service = rig.start()
        assert rig.events() == [started(rig), started(rig)]
        act(service)
        rig.kill()
        assert list(rig.start().state.jobs) == ["one", "two"]

    def test_a_half_written_last_entry_costs_only_that_entry(self, rig):
        act(rig.start())
        rig.kill()
        path = rig.run_dir / "journal.msgpack"
        path.write_bytes(path.read_bytes()[:-3])
        service = rig.start()
        assert service.state.rounds == 0
        service.handle(SubmitJob(spec=spec("three")))
        rig.kill()
        assert list(rig.start().state.jobs) == ["one", "two", "three"]

    @pytest.mark.parametrize(
        ("sections", "named"),
        [
            ({"scheduler": SchedulerConfig(policy="pollux")}, ("scheduler.policy", "fixed", "pollux")),
            ({"run": RunConfig(run_id="run", seed=4)}, ("run.seed", "3", "4")),
            (
                {"applications": ApplicationsConfig(modules=("tests.fixtures.tiny_app",))},
                ("applications.modules", "(none)", "tests.fixtures.tiny_app"),
            ),
        ],
    )
    def test_a_run_is_not_resumed_with_another_setting_of_the_core(self, rig, sections, named):
        act(rig.start())
        rig.kill()
        journal = (rig.run_dir / "journal.msgpack").read_bytes()
        if "run" in sections:
            sections["run"] = msgspec.structs.replace(sections["run"], logs_dir=str(rig.folder))
        with pytest.raises(UserError) as refused:
            rig.start(**sections)
        assert "\n" not in str(refused.value)
        assert all(text in str(refused.value) for text in ("'run'", *named))
        rig.close()
        assert (rig.run_dir / "journal.msgpack").read_bytes() == journal
        assert list(rig.start().state.jobs) == ["one", "two"], "it resumes with the original settings"

    def test_a_run_whose_configuration_is_damaged_or_missing_is_not_resumed(self, rig):
        rig.start()
        rig.kill()
        (rig.run_dir / "config.json").write_text("{")
        with pytest.raises(UserError, match=r"config\.json: .* cannot be resumed"):
            rig.start()
        rig.close()
        (rig.run_dir / "config.json").unlink()
        with pytest.raises(UserError, match=r"config\.json: .* cannot be resumed"):
            rig.start()


def test_published_events_counts_the_events_of_every_scheduler_of_the_run_and_no_others(tmp_path):
    log = EventLogWriter(tmp_path)
    log.append(
        EventRecord(
            run_id="run",
            source=source,
            incarnation=incarnation,
            seq=seq,
            t_s=0.0,
            wall_s=0.0,
            event=JobSubmitted(spec=spec("job")),
        )
        for source, incarnation, count in (
            ("scheduler", "one", 5),
            ("agent-a", "x", 9),
            ("scheduler", "two", 2),
        )
        for seq in range(1, count + 1)
    )
    log.close()
    assert published_events(tmp_path) == 7
    path = tmp_path / EVENTS_FILE
    path.write_bytes(path.read_bytes()[:-10])
    assert published_events(tmp_path) == 6, "a killed logger may leave half a line"
    assert published_events(tmp_path / "gone") == 0


def started(rig: Rig) -> RunStarted:
    (event, *_) = [event for event in rig.events() if isinstance(event, RunStarted)]
    return event


def kill_after(service: SchedulerService, total: int) -> None:
    """End the process instead of publishing more than `total` events of the run."""
    publish = service.publisher.publish

    def limited(event: Event) -> None:
        if service.published >= total:
            raise Killed
        publish(event)

    service.publisher.publish = limited  # type: ignore[method-assign]


def cut_last_records(rig: Rig, count: int) -> None:
    (path,) = rig.run_dir.glob("outbox/scheduler-*.msgpack")
    with path.open("rb") as file:
        trees = list(msgpack.Unpacker(file))
    path.write_bytes(b"".join(map(msgpack.packb, trees[:-count])))
