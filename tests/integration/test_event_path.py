"""No event is ever lost: a real event-logger process and real publishers, stopped, killed and overloaded."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from common.config import Config, EndpointsConfig, RunConfig, config_environment
from common.eventlog import EVENTS_FILE, read_events
from common.lifecycle import StopFlag
from common.messaging.curve_keys import load_keys, make_keys
from common.messaging.publish_subscribe import EventPublisher
from common.messaging.reactor import Reactor
from common.messaging.request_reply import RequestClient, ServerUnavailable
from common.protocol import (
    Acknowledged,
    BadMessage,
    CancelJob,
    EventRecord,
    EventsDropped,
    GetAcknowledged,
    JobCancelled,
    Refused,
    RepairEvents,
)
from services.launcher.stack import free_endpoints

WAIT_S = 30
ROOT = Path(__file__).parents[2]

PUBLISHER = """
    import os, sys
    from pathlib import Path
    from common.config import load_config
    from common.lifecycle import StopFlag
    from common.protocol import JobCancelled
    from common.messaging.publish_subscribe import EventPublisher
    from common.messaging.reactor import Reactor

    config = load_config(os.environ)
    stop = StopFlag().install()
    reactor = Reactor(stop)
    outbox_dir = config.run_dir("run") / "outbox"
    publisher = EventPublisher(reactor, "run", "agent-a", sys.argv[1], config.endpoints, outbox_dir)

    def publish(count):
        for n in range(count):
            publisher.publish(JobCancelled(job_id=f"job-{n}"))

    def say(text):
        os.write(1, text.encode() + b"\\n")
"""


STOPS_LATE = """
    publish(10)
    assert reactor.run_until(lambda: publisher.pending == 0, 20)
    say("ready")
    reactor.run()  # until SIGTERM
    reactor.run_until(lambda: False, 1.5)
    publish(10)
    sys.exit(0 if publisher.close(5) else 1)
"""


class LoggerStack:
    """An event-logger that can be started, stopped and killed, and publishers."""

    def __init__(self, logs_dir, keys_dir=""):
        self.logs_dir = logs_dir
        endpoints = free_endpoints(EndpointsConfig(keys_dir=keys_dir))
        self.config = Config(run=RunConfig(logs_dir=str(logs_dir)), endpoints=endpoints)
        self.environment = os.environ | config_environment(self.config)
        self.processes = []
        self.logger = None
        self.client = RequestClient(self.config.endpoints.logger_requests, load_keys(keys_dir))

    def start_logger(self, wait=True):
        self.logger = self.spawn(["-m", "services.event_logger"], stderr=subprocess.PIPE)
        if wait:
            self.acknowledged("agent-a", "unknown", timeout_s=0.2, attempts=20)

    def spawn(self, arguments, **options):
        process = subprocess.Popen([sys.executable, *arguments], env=self.environment, cwd=ROOT, **options)
        self.processes.append(process)
        return process

    def spawn_publisher(self, incarnation, code):
        """A process with a publisher of the source "agent-a" that runs `code`."""
        script = textwrap.dedent(PUBLISHER) + textwrap.dedent(code)
        return self.spawn(["-c", script, incarnation], stdout=subprocess.PIPE)

    def stop_logger(self):
        """Send SIGTERM. Returns (exit code, seconds until the exit)."""
        start_s = time.monotonic()
        self.logger.send_signal(signal.SIGTERM)
        exit_code = self.logger.wait(WAIT_S)
        return exit_code, time.monotonic() - start_s

    def kill_logger(self):
        self.logger.kill()
        self.logger.wait(WAIT_S)

    def acknowledged(self, source, incarnation, **options):
        reply = self.client.request(
            GetAcknowledged(run_id="run", source=source, incarnation=incarnation), **options
        )
        return reply.seq

    @property
    def log(self):
        return self.logs_dir / "run" / EVENTS_FILE

    def numbers(self, source, incarnation):
        """The numbers of a publisher's events in the log, in order."""
        return [r.seq for r in read_events(self.log) if (r.source, r.incarnation) == (source, incarnation)]

    def outboxes(self):
        return sorted(self.logs_dir.glob("*/outbox/*"))

    def close(self):
        self.client.close()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(WAIT_S)
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()


@pytest.fixture
def stack(tmp_path):
    stack = LoggerStack(tmp_path / "logs")
    yield stack
    stack.close()


@pytest.fixture
def reactor():
    stop = StopFlag()
    reactor = Reactor(stop)
    yield reactor
    reactor.close()
    stop.close()


@pytest.fixture
def publisher(stack, reactor):
    """A publisher of the source "scheduler" in this process. The test closes it, or not."""
    return make_publisher(stack, reactor, "one")


def make_publisher(stack, reactor, incarnation):
    outbox_dir = stack.logs_dir / "run" / "outbox"
    return EventPublisher(reactor, "run", "scheduler", incarnation, stack.config.endpoints, outbox_dir)


def publish(publisher, count):
    for n in range(count):
        publisher.publish(JobCancelled(job_id=f"job-{n}"))


def record(seq, run_id="run", source="agent-x", incarnation="one"):
    return EventRecord(
        run_id=run_id,
        source=source,
        incarnation=incarnation,
        seq=seq,
        t_s=0.0,
        wall_s=0.0,
        event=JobCancelled(job_id="a"),
    )


class TestNoEventIsLost:
    def test_before_the_logger_is_connected(self, stack, reactor, publisher):
        publish(publisher, 100)
        stack.start_logger()
        assert publisher.close(WAIT_S)
        assert stack.numbers("scheduler", "one") == list(range(1, 101))
        assert stack.outboxes() == []

    def test_when_the_logger_starts_long_after_the_publisher(self, stack, reactor, publisher):
        publish(publisher, 10)
        assert not reactor.run_until(lambda: publisher.pending == 0, 1.5)
        stack.start_logger()
        assert reactor.run_until(lambda: publisher.pending == 0, WAIT_S)
        assert stack.numbers("scheduler", "one") == list(range(1, 11))

    def test_when_the_queues_of_a_stopped_logger_overflow(self, stack, reactor, publisher):
        stack.start_logger()
        publish(publisher, 10)
        assert reactor.run_until(lambda: publisher.pending == 0, WAIT_S)
        stack.logger.send_signal(signal.SIGSTOP)
        publish(publisher, 40_000)
        stack.logger.send_signal(signal.SIGCONT)
        assert publisher.close(WAIT_S)
        assert stack.numbers("scheduler", "one") == list(range(1, 40_011))

    def test_when_the_logger_is_killed_repeatedly(self, stack, reactor, publisher):
        total = 0
        for _ in range(4):
            stack.start_logger(wait=False)
            for _ in range(20):
                publish(publisher, 50)
                total += 50
                reactor.run_until(lambda: publisher.pending == 0, 0.02)
            stack.kill_logger()
            publish(publisher, 50)
            total += 50
        stack.start_logger()
        assert publisher.close(WAIT_S)
        assert stack.numbers("scheduler", "one") == list(range(1, total + 1))

    def test_acknowledged_events_are_in_the_file_of_a_killed_logger(self, stack):
        stack.start_logger()
        reply = stack.client.request(RepairEvents(records=tuple(record(n) for n in range(1, 501))))
        stack.kill_logger()
        assert reply == Acknowledged(seq=500)
        assert stack.numbers("agent-x", "one") == list(range(1, 501))

    def test_when_a_publisher_closes_right_after_publishing(self, stack):
        stack.start_logger()
        code = "publish(500); sys.exit(0 if publisher.close(20) else 1)"
        assert stack.spawn_publisher("hasty", code).wait(WAIT_S) == 0
        assert stack.numbers("agent-a", "hasty") == list(range(1, 501))
        assert stack.outboxes() == []

    def test_when_a_publisher_exits_without_closing(self, stack):
        stack.start_logger()
        assert stack.spawn_publisher("unclosed", "publish(500); os._exit(0)").wait(WAIT_S) == 0
        assert stack.stop_logger()[0] == 0
        assert stack.numbers("agent-a", "unclosed") == list(range(1, 501))
        assert stack.outboxes() == []

    def test_when_a_publisher_is_killed_while_it_publishes(self, stack):
        stack.start_logger()
        code = """
            while True:
                publish(1)
                say(str(publisher._delivery._own.last_seq))
        """
        process = stack.spawn_publisher("victim", code)
        for line in process.stdout:
            if int(line) >= 2000:
                process.kill()
                break
        reported = [int(line) for line in process.stdout.read().split()]
        process.wait(WAIT_S)
        assert stack.stop_logger()[0] == 0
        numbers = stack.numbers("agent-a", "victim")
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= max(reported, default=2000)
        assert stack.outboxes() == []

    def test_when_the_successor_of_a_dead_publisher_takes_over(self, stack):
        assert stack.spawn_publisher("first", "publish(300); os._exit(0)").wait(WAIT_S) == 0
        stack.start_logger(wait=False)
        stack.kill_logger()
        successor = stack.spawn_publisher("second", "publish(3); sys.exit(0 if publisher.close(20) else 1)")
        stack.start_logger()
        assert successor.wait(WAIT_S) == 0
        assert stack.numbers("agent-a", "first") == list(range(1, 301))
        assert stack.numbers("agent-a", "second") == [1, 2, 3]
        assert stack.outboxes() == []

    def test_when_publisher_and_logger_are_both_killed(self, stack):
        stack.start_logger()
        process = stack.spawn_publisher("gone", "say('ready'); sys.stdin.read(); publish(300); os._exit(0)")
        process.stdout.readline()
        stack.kill_logger()
        process.kill()
        process.wait(WAIT_S)
        assert stack.spawn_publisher("gone-too", "publish(300); os._exit(0)").wait(WAIT_S) == 0
        stack.start_logger()
        assert stack.numbers("agent-a", "gone-too") == list(range(1, 301))
        assert stack.outboxes() == []

    def test_when_a_publisher_stops_seconds_later_than_the_logger(self, stack):
        """All processes get SIGTERM at the same time; the logger waits for the slower ones."""
        stack.start_logger()
        process = stack.spawn_publisher("slow", STOPS_LATE)
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        exit_code, took_s = stack.stop_logger()
        assert (exit_code, process.wait(WAIT_S)) == (0, 0)
        assert 1.0 < took_s < 5
        assert stack.numbers("agent-a", "slow") == list(range(1, 21))

    def test_when_a_restarted_logger_does_not_know_an_idle_publisher(self, stack):
        stack.start_logger()
        process = stack.spawn_publisher("idle", STOPS_LATE)
        process.stdout.readline()
        stack.kill_logger()
        stack.start_logger()
        process.send_signal(signal.SIGTERM)
        assert stack.stop_logger()[0] == 0
        assert process.wait(WAIT_S) == 0
        assert stack.numbers("agent-a", "idle") == list(range(1, 21))

    def test_when_many_publishers_publish_at_once(self, stack):
        stack.start_logger()
        code = "publish(2000); sys.exit(0 if publisher.close(20) else 1)"
        publishers = {f"p{n}": stack.spawn_publisher(f"p{n}", code) for n in range(4)}
        for name, process in publishers.items():
            assert process.wait(WAIT_S) == 0
            assert stack.numbers("agent-a", name) == list(range(1, 2001))


class TestKeys:
    def test_events_are_encrypted_and_a_publisher_without_the_key_is_refused(self, tmp_path, reactor):
        make_keys(tmp_path / "keys")
        stack = LoggerStack(tmp_path / "logs", keys_dir=str(tmp_path / "keys"))
        with contextlib.closing(stack):
            stack.start_logger()
            publisher = make_publisher(stack, reactor, "one")
            publish(publisher, 200)
            bare = msgspec.structs.replace(stack.config.endpoints, keys_dir="")
            stranger = EventPublisher(reactor, "run", "stranger", "one", bare, tmp_path / "elsewhere")
            publish(stranger, 10)
            assert publisher.close(WAIT_S)
            assert not stranger.close(0.5)
            assert stack.numbers("scheduler", "one") == list(range(1, 201))
            assert stack.numbers("stranger", "one") == []


class TestGaps:
    def test_events_that_exist_nowhere_any_more_are_recorded_as_dropped(self, stack):
        stack.start_logger()
        assert stack.client.request(RepairEvents(records=(record(7), record(8)))) == Acknowledged(seq=8)
        dropped = [r.event for r in read_events(stack.log) if isinstance(r.event, EventsDropped)]
        assert dropped == [EventsDropped(source="agent-x", incarnation="one", first_seq=1, last_seq=6)]

    def test_a_log_that_was_deleted_continues_and_records_what_is_lost(self, stack, reactor, publisher):
        stack.start_logger()
        publish(publisher, 10)
        assert reactor.run_until(lambda: publisher.pending == 0, WAIT_S)
        stack.kill_logger()
        stack.log.unlink()
        stack.start_logger()
        publish(publisher, 5)
        assert publisher.close(WAIT_S)
        assert stack.numbers("scheduler", "one") == [11, 12, 13, 14, 15]
        dropped = [r.event for r in read_events(stack.log) if isinstance(r.event, EventsDropped)]
        assert dropped == [EventsDropped(source="scheduler", incarnation="one", first_seq=1, last_seq=10)]


class TestStop:
    def test_an_idle_logger_creates_no_file_and_stops_at_once(self, stack):
        stack.start_logger()
        exit_code, took_s = stack.stop_logger()
        assert exit_code == 0
        assert took_s < 2
        assert not stack.logs_dir.exists()

    def test_an_interrupt_stops_the_logger_with_130(self, stack):
        stack.start_logger()
        stack.logger.send_signal(signal.SIGINT)
        assert stack.logger.wait(WAIT_S) == 130

    def test_a_publisher_that_never_says_good_bye_delays_the_stop_only_for_a_limited_time(self, stack):
        stack.start_logger()
        process = stack.spawn_publisher("frozen", "publish(10); say('ready'); sys.stdin.read()")
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        exit_code, took_s = stack.stop_logger()
        assert exit_code == 0
        assert 3 < took_s < 5

    def test_a_killed_publisher_does_not_delay_the_stop(self, stack):
        stack.start_logger()
        process = stack.spawn_publisher("dead", "publish(10); say('ready'); sys.stdin.read()")
        process.stdout.readline()
        process.kill()
        process.wait(WAIT_S)
        exit_code, took_s = stack.stop_logger()
        assert exit_code == 0
        assert took_s < 2
        assert stack.numbers("agent-a", "dead") == list(range(1, 11))

    def test_the_log_lines_are_plain_and_without_a_traceback(self, stack, reactor, publisher):
        stack.start_logger()
        publish(publisher, 1)
        assert publisher.close(WAIT_S)
        stack.stop_logger()
        lines = stack.logger.stderr.read().decode().splitlines()
        assert [line.split(" ", 1)[1].split(" ")[:3] for line in lines] == [
            ["event-logger", "info:", "ready"],
            ["event-logger", "info:", "writing"],
        ]


class TestBadInput:
    def test_a_port_in_use_gives_one_line_and_exit_code_2(self, stack):
        stack.start_logger()
        second = stack.spawn(["-m", "services.event_logger"], stderr=subprocess.PIPE, text=True)
        _, err = second.communicate(timeout=WAIT_S)
        assert second.returncode == 2
        endpoint = stack.config.endpoints.logger_requests
        assert err == (
            f"event-logger: {endpoint}: already taken: is another stack running? "
            "(configured as endpoints.logger_requests)\n"
        )

    def test_a_bad_configuration_gives_one_line_and_exit_code_2(self, stack):
        stack.environment["COADAPT_LIMITS_DEPTH"] = "deep"
        process = stack.spawn(["-m", "services.event_logger"], stderr=subprocess.PIPE, text=True)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2
        assert err.startswith("event-logger: COADAPT_LIMITS_DEPTH='deep': Expected `int`")
        assert err.count("\n") == 1

    def test_a_public_address_is_refused_without_keys(self, stack):
        stack.environment["COADAPT_ENDPOINTS_LOGGER_EVENTS"] = "tcp://0.0.0.0:7806"
        process = stack.spawn(["-m", "services.event_logger"], stderr=subprocess.PIPE, text=True)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2
        assert "endpoints.keys_dir" in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize("run_id", ["../elsewhere", "a/b", "", ".", "x" * 200, "a\nb", "a\0b"])
    def test_a_run_id_that_no_folder_can_have_is_refused(self, stack, tmp_path, run_id):
        stack.start_logger()
        for request in (
            RepairEvents(records=(record(1, run_id),)),
            GetAcknowledged(run_id=run_id, source="a", incarnation="b"),
        ):
            reply = stack.client.request(request)
            assert isinstance(reply, Refused)
            assert reply.reason.startswith("run_id = ")
        assert not list(tmp_path.rglob(EVENTS_FILE))

    def test_bad_messages_are_refused_and_logged_and_the_logger_continues(self, stack, reactor, publisher):
        stack.start_logger()
        publish(publisher, 1)
        assert reactor.run_until(lambda: publisher.pending == 0, WAIT_S)
        for n in range(50):
            publisher._socket.send(b"JobCancelled", os.urandom(n))
        assert isinstance(stack.client.request(CancelJob(job_id="a")), Refused)
        assert isinstance(stack.client.request(RepairEvents(records=())), Refused)
        mixed = RepairEvents(records=(record(1), record(2, source="other")))
        assert isinstance(stack.client.request(mixed), Refused)
        publish(publisher, 1)
        assert publisher.close(WAIT_S)
        assert stack.numbers("scheduler", "one") == [1, 2]
        assert any(isinstance(r.event, BadMessage) for r in read_events(stack.log))

    def test_a_record_of_an_impossible_run_is_ignored(self, stack, reactor, publisher, tmp_path):
        stack.start_logger()
        outside = EventPublisher(
            reactor, "../outside", "scheduler", "one", stack.config.endpoints, tmp_path / "elsewhere"
        )
        publish(outside, 3)
        publish(publisher, 3)
        assert publisher.close(WAIT_S)
        assert not outside.close(0.5)
        assert stack.numbers("scheduler", "one") == [1, 2, 3]
        assert not (tmp_path / "outside").exists()


class TestAbandonedRequests:
    def test_a_request_given_up_while_the_logger_was_stopped_is_never_carried_out(self, stack):
        stack.start_logger()
        for n in range(5):
            stack.logger.send_signal(signal.SIGSTOP)
            ghost = RepairEvents(records=(record(1, run_id=f"ghost-{n}"),))
            with pytest.raises(ServerUnavailable):
                stack.client.request(ghost, timeout_s=0.1, attempts=3)
            stack.logger.send_signal(signal.SIGCONT)
            assert stack.acknowledged("agent-a", "one", timeout_s=5) == 0
        assert not list(stack.logs_dir.glob("ghost-*"))

    def test_a_request_given_up_before_the_logger_started_is_never_carried_out(self, stack):
        with pytest.raises(ServerUnavailable):
            stack.client.request(RepairEvents(records=(record(1, run_id="ghost"),)), timeout_s=0.1)
        stack.start_logger()
        assert stack.stop_logger()[0] == 0
        assert not stack.logs_dir.exists()


class TestCost:
    def test_an_idle_logger_needs_almost_no_processor_time(self, stack, reactor, publisher):
        stack.start_logger()
        publish(publisher, 100)
        assert reactor.run_until(lambda: publisher.pending == 0, WAIT_S)
        seconds = 3.0
        before_s = processor_seconds(stack.logger.pid)
        assert not reactor.run_until(lambda: False, seconds)
        share = (processor_seconds(stack.logger.pid) - before_s) / seconds
        assert share < 0.01
        assert publisher.close(WAIT_S)

    def test_memory_stays_small_under_many_events(self, stack, reactor, publisher):
        stack.start_logger()
        publish(publisher, 20_000)
        assert publisher.close(WAIT_S)
        memory_bytes = psutil.Process(stack.logger.pid).memory_info().rss
        assert memory_bytes < 60_000_000

    def test_an_event_costs_less_than_a_millisecond_of_processor_time(self, stack, reactor, publisher):
        """Publisher and logger together, in processor time, so other load does not matter."""
        stack.start_logger()
        processes = (os.getpid(), stack.logger.pid)
        before_s = sum(map(processor_seconds, processes))
        publish(publisher, 10_000)
        assert publisher.close(WAIT_S)
        assert (sum(map(processor_seconds, processes)) - before_s) / 10_000 < 0.001


def processor_seconds(pid):
    """Processor time of all threads, in the resolution of schedstat, nanoseconds."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9
