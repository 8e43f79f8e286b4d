"""Events are kept until they are acknowledged, and reach the log whatever is lost or killed on the way."""

import fcntl
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.codec import decode, encode
from common.config import LimitsConfig
from common.eventlog import EVENTS_FILE, EventLogWriter, read_events
from common.lifecycle import Timers, UserError
from common.messaging.outbox import (
    ASK_S,
    COMPACT_BYTES,
    Delivery,
    Origin,
    Outbox,
    left_over,
    living_owners,
)
from common.protocol import (
    Acknowledged,
    EventRecord,
    GetAcknowledged,
    GoodBye,
    JobCancelled,
    JobFailed,
    Refused,
    RepairEvents,
)
from tests.fixtures.full_disk import disk_that_takes

LIMITS = LimitsConfig()
ORIGIN = Origin("run", "scheduler", "one")
FILE = "scheduler-one.msgpack"


def record(seq, origin=ORIGIN, text=""):
    event = JobFailed(job_id=f"job-{seq}", reason=text)
    return EventRecord(**origin._asdict(), seq=seq, t_s=0.0, wall_s=0.0, event=event)


def filled(folder, count, origin=ORIGIN, text=""):
    outbox = Outbox.create(folder, origin, LIMITS)
    for seq in range(1, count + 1):
        outbox.append(encode(record(seq, origin, text)))
    return outbox


def seqs(outbox):
    return [r.seq for r in outbox.records(outbox.last_seq, 10**9)]


class TestOutbox:
    def test_appended_records_come_back_oldest_first(self, tmp_path):
        outbox = filled(tmp_path, 3)
        assert outbox.records(3, 10**9) == [record(1), record(2), record(3)]

    def test_records_end_at_a_number_or_a_size_but_one_is_always_given(self, tmp_path):
        outbox = filled(tmp_path, 10)
        size_bytes = len(encode(record(1)))
        assert [r.seq for r in outbox.records(4, 10**9)] == [1, 2, 3, 4]
        assert [r.seq for r in outbox.records(10, 3 * size_bytes)] == [1, 2, 3]
        assert [r.seq for r in outbox.records(10, 1)] == [1]
        assert outbox.records(0, 10**9) == []

    def test_a_folder_that_cannot_be_created_is_an_error_for_people(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"scheduler-one\.msgpack: cannot be created: Not a directory"):
            Outbox.create(tmp_path / "file" / "outbox", ORIGIN, LIMITS)

    def test_acknowledged_records_are_removed(self, tmp_path):
        outbox = filled(tmp_path, 5)
        outbox.acknowledge(3)
        outbox.acknowledge(1)
        assert (outbox.pending, seqs(outbox)) == (2, [4, 5])

    def test_the_file_is_emptied_when_everything_is_acknowledged(self, tmp_path):
        outbox = filled(tmp_path, 5)
        outbox.acknowledge(5)
        assert (tmp_path / FILE).stat().st_size == 0
        outbox.append(encode(record(6)))
        assert seqs(outbox) == [6]

    def test_the_file_is_shortened_while_there_is_always_something_unacknowledged(self, tmp_path):
        outbox = filled(tmp_path, 5, text="x" * 10_000)
        for seq in range(6, 400):
            outbox.append(encode(record(seq, text="x" * 10_000)))
            outbox.acknowledge(seq - 5)
        assert (tmp_path / FILE).stat().st_size < 2 * COMPACT_BYTES
        assert seqs(outbox) == [395, 396, 397, 398, 399]
        outbox.release()
        taken = Outbox.take_over(tmp_path / FILE, LIMITS)
        assert {395, 396, 397, 398, 399} <= set(seqs(taken))

    def test_a_shortened_file_is_still_locked(self, tmp_path):
        outbox = filled(tmp_path, 200, text="x" * 10_000)
        outbox.acknowledge(150)
        assert seqs(outbox) == list(range(151, 201))
        assert Outbox.take_over(tmp_path / FILE, LIMITS) is None

    def test_an_outbox_is_not_taken_over_while_its_owner_lives(self, tmp_path):
        outbox = filled(tmp_path, 2)
        assert Outbox.take_over(tmp_path / FILE, LIMITS) is None
        assert list(left_over(tmp_path, LIMITS)) == []
        assert living_owners(tmp_path) == 1
        outbox.release()
        assert living_owners(tmp_path) == 0

    def test_a_left_over_file_comes_back_with_its_records_and_their_origin(self, tmp_path):
        outbox = filled(tmp_path, 5)
        outbox.acknowledge(2)
        outbox.release()
        (taken,) = left_over(tmp_path, LIMITS)
        assert taken.origin == ORIGIN
        assert seqs(taken) == [1, 2, 3, 4, 5]
        taken.acknowledge(4)
        assert seqs(taken) == [5]

    def test_a_half_written_last_record_is_left_out(self, tmp_path):
        filled(tmp_path, 3).release()
        whole = (tmp_path / FILE).read_bytes()
        for cut in range(1, len(encode(record(3)))):
            (tmp_path / FILE).write_bytes(whole[:-cut])
            taken = Outbox.take_over(tmp_path / FILE, LIMITS)
            assert seqs(taken) == [1, 2]
            taken.release()

    def test_damage_loses_the_records_after_it_and_is_logged(self, tmp_path, capfd):
        filled(tmp_path, 3).release()
        data = bytearray((tmp_path / FILE).read_bytes())
        data[len(encode(record(1))) + 2] ^= 0xFF
        (tmp_path / FILE).write_bytes(data)
        assert seqs(Outbox.take_over(tmp_path / FILE, LIMITS)) == [1]
        assert "outbox is damaged" in capfd.readouterr().err

    def test_an_empty_left_over_is_deleted(self, tmp_path):
        filled(tmp_path, 0).release()
        assert list(left_over(tmp_path, LIMITS)) == []
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_was_replaced_is_not_confused_with_the_new_one(self, tmp_path, monkeypatch):
        filled(tmp_path, 1).release()
        lock = fcntl.flock

        def replace_then_lock(fd, operation):
            monkeypatch.setattr(fcntl, "flock", lock)
            os.rename(tmp_path / FILE, tmp_path / "elsewhere")
            filled(tmp_path, 2)
            lock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", replace_then_lock)
        assert Outbox.take_over(tmp_path / FILE, LIMITS) is None

    def test_records_that_the_disk_refuses_stay_in_memory(self, tmp_path, capfd):
        outbox = filled(tmp_path, 2)
        size_bytes = (tmp_path / FILE).stat().st_size
        with disk_that_takes(size_bytes + 10):
            outbox.append(encode(record(3)))
            outbox.append(encode(record(4)))
        outbox.append(encode(record(5)))
        assert seqs(outbox) == [1, 2, 3, 4, 5]
        assert capfd.readouterr().err.count("outbox cannot be written") == 1
        outbox.acknowledge(5)
        outbox.append(encode(record(6)))
        outbox.release()
        assert seqs(Outbox.take_over(tmp_path / FILE, LIMITS)) == [6]

    def test_a_file_has_no_gap_after_a_full_disk(self, tmp_path):
        outbox = filled(tmp_path, 2)
        with disk_that_takes((tmp_path / FILE).stat().st_size + 10):
            outbox.append(encode(record(3)))
        outbox.append(encode(record(4)))
        outbox.release()
        assert seqs(Outbox.take_over(tmp_path / FILE, LIMITS)) == [1, 2]


class Logger:
    """A logger around a real writer; `silent` while it is stopped or dead."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.writer = EventLogWriter(run_dir)
        self.silent = False
        self.asked = []

    def post(self, request, on_reply, on_silence):
        self.asked.append(request)
        if self.silent:
            return on_silence()
        if isinstance(request, RepairEvents):
            self.writer.append(request.records)
            request = request.records[0]
        return on_reply(Acknowledged(seq=self.writer.acknowledged(request.source, request.incarnation)))

    def take(self, data):
        """Receive a record that publish/subscribe did not lose."""
        self.writer.append([decode(data, EventRecord)])

    def restart(self):
        self.writer.close()
        self.writer = EventLogWriter(self.run_dir)

    def written(self):
        path = self.run_dir / EVENTS_FILE
        return [(r.incarnation, r.seq) for r in read_events(path)] if path.stat().st_size else []


class World:
    """A publisher's delivery, a logger, and a clock for both."""

    def __init__(self, folder, limits=LIMITS):
        self.now_s = 0.0
        self.folder = folder
        self.limits = limits
        self.logger = Logger(folder)
        self.publishers = 0
        self.start()

    def start(self):
        self.publishers += 1
        self.timers = Timers(lambda: self.now_s)
        origin = Origin("run", "scheduler", f"p{self.publishers}")
        self.delivery = Delivery(origin, self.folder / "outbox", self.logger, self.timers, self.limits)

    def kill(self):
        """Do what a kill does: the kernel closes the files of the publisher, and none of its code runs any
        more."""
        for outbox in self.delivery._outboxes:
            outbox.release()

    def publish(self, lost=False):
        data = self.delivery.keep(JobCancelled(job_id="a"), self.now_s, 0.0)
        if not lost and not self.logger.silent:
            self.logger.take(data)

    def pass_seconds(self, seconds):
        for _ in range(round(seconds * 20)):
            self.now_s += 0.05
            self.timers.run_due()


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


class TestDelivery:
    def test_events_that_arrived_are_acknowledged_without_a_repair(self, world):
        for _ in range(5):
            world.publish()
        world.pass_seconds(2)
        assert world.delivery.pending == 0
        assert world.logger.asked == [GetAcknowledged(run_id="run", source="scheduler", incarnation="p1")]

    def test_lost_events_are_repaired_within_seconds(self, world):
        for n in range(20):
            world.publish(lost=n % 3 == 0)
        world.pass_seconds(2)
        assert world.delivery.pending == 0
        assert world.logger.written() == [("p1", n) for n in range(1, 21)]

    def test_the_first_events_which_a_new_subscription_misses_are_repaired_at_once(self, world):
        world.publish(lost=True)
        world.pass_seconds(0.5)
        assert world.logger.written() == [("p1", 1)]

    def test_events_published_since_the_last_question_are_not_repeated(self, world):
        world.publish(lost=True)
        world.delivery._settled_seq = 0
        world.delivery._asked_seq = 0
        world.delivery._ask()
        assert [type(r) for r in world.logger.asked] == [GetAcknowledged]

    def test_a_busy_publisher_asks_once_a_second(self, world):
        for _ in range(200):
            world.publish()
            world.pass_seconds(0.05)
        assert len(world.logger.asked) <= 10 / ASK_S + 4

    def test_an_idle_publisher_asks_nothing(self, world):
        world.pass_seconds(60)
        assert world.logger.asked == []

    def test_a_silent_logger_is_asked_again_until_it_answers(self, world):
        world.logger.silent = True
        for _ in range(10):
            world.publish()
        world.pass_seconds(30)
        assert world.delivery.pending == 10
        world.logger.silent = False
        world.pass_seconds(3)
        assert world.logger.written() == [("p1", n) for n in range(1, 11)]

    def test_a_large_backlog_is_sent_in_pieces_that_the_logger_accepts(self, tmp_path):
        world = World(tmp_path, LimitsConfig(message_bytes=400_000))
        world.logger.silent = True
        for _ in range(8_000):
            world.publish()
        world.logger.silent = False
        world.pass_seconds(5)
        repairs = [r for r in world.logger.asked if isinstance(r, RepairEvents)]
        assert len(repairs) > 2
        assert max(len(encode(r)) for r in repairs) < 400_000
        assert world.logger.written() == [("p1", n) for n in range(1, 8_001)]

    def test_a_flush_repairs_everything_at_once(self, world):
        for _ in range(5):
            world.publish(lost=True)
        world.delivery.flush()
        world.timers.run_due()
        assert world.delivery.pending == 0

    def test_a_closed_delivery_leaves_a_file_only_for_what_is_unacknowledged(self, world, tmp_path):
        world.publish()
        world.delivery.flush()
        world.timers.run_due()
        world.delivery.close()
        assert list((tmp_path / "outbox").iterdir()) == []

    def test_the_next_publisher_of_the_source_takes_over_what_a_killed_one_left(self, world, tmp_path):
        for _ in range(5):
            world.publish(lost=True)
        world.kill()
        world.start()
        world.publish()
        world.pass_seconds(3)
        assert world.delivery.pending == 0
        assert sorted(world.logger.written()) == [("p1", n) for n in range(1, 6)] + [("p2", 1)]
        assert [p.name for p in (tmp_path / "outbox").iterdir()] == ["scheduler-p2.msgpack"]

    def test_another_source_with_a_longer_name_is_left_alone(self, world, tmp_path):
        filled(tmp_path / "outbox", 2, Origin("run", "scheduler-two", "x")).release()
        world.kill()
        world.start()
        world.pass_seconds(3)
        assert world.logger.asked == []
        assert (tmp_path / "outbox" / "scheduler-two-x.msgpack").exists()

    def test_an_event_beyond_the_limit_is_an_error_and_costs_no_number(self, tmp_path):
        world = World(tmp_path, LimitsConfig(message_bytes=1000))
        with pytest.raises(ValueError, match=r"JobFailed of .* bytes is too large"):
            world.delivery.keep(JobFailed(job_id="a", reason="x" * 600), 0.0, 0.0)
        world.publish()
        world.pass_seconds(2)
        assert world.logger.written() == [("p1", 1)]

    def test_a_refusal_is_logged_and_does_not_stop_the_questions(self, world, capfd):
        answer = world.logger.post
        world.logger.post = lambda request, on_reply, on_silence: on_reply(Refused(reason="no such run"))
        world.publish()
        world.pass_seconds(2)
        assert "no such run" in capfd.readouterr().err
        world.logger.post = answer
        world.pass_seconds(2)
        assert world.delivery.pending == 0

    def test_goodbye_names_this_incarnation(self, world):
        said = []
        world.delivery.say_goodbye(lambda: said.append(True))
        assert world.logger.asked == [GoodBye(run_id="run", source="scheduler", incarnation="p1")]
        assert said == [True]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.lists(
            st.sampled_from(
                ["publish", "lose", "second", "stop logger", "start logger", "kill logger", "kill me"]
            ),
            max_size=60,
        )
    )
    def test_every_event_is_written_once_and_in_order_whatever_happens(self, tmp_path_factory, steps):
        world = World(tmp_path_factory.mktemp("run"))
        published = []
        for step in steps:
            match step:
                case "publish" | "lose":
                    world.publish(lost=step == "lose")
                    published.append((f"p{world.publishers}", world.delivery._own.last_seq))
                case "second":
                    world.pass_seconds(1)
                case "stop logger":
                    world.logger.silent = True
                case "start logger":
                    world.logger.silent = False
                case "kill logger":
                    world.logger.restart()
                case "kill me":
                    world.kill()
                    world.start()
        world.logger.silent = False
        world.pass_seconds(10)
        assert world.delivery.pending == 0
        written = world.logger.written()
        assert sorted(written) == sorted(published)
        for incarnation in {i for i, _ in written}:
            own = [seq for i, seq in written if i == incarnation]
            assert own == sorted(own)
        world.kill()
        world.logger.writer.close()
