"""The poll loop of a service."""

import os
import subprocess
import sys
import threading
import time

from tests.fixtures.messaging_servers import WAIT_S


class TestReactor:
    def test_a_file_descriptor_calls_its_handler(self, reactor):
        read_fd, write_fd = os.pipe()
        got = []
        reactor.on_fd(read_fd, lambda: got.append(os.read(read_fd, 10)))
        os.write(write_fd, b"hello")
        assert reactor.run_until(lambda: got, WAIT_S)
        assert got == [b"hello"]
        reactor.remove_fd(read_fd)
        os.write(write_fd, b"again")
        assert not reactor.run_until(lambda: len(got) > 1, 0.05)
        os.close(read_fd)
        os.close(write_fd)

    def test_the_end_of_a_pipe_calls_its_handler_too(self, reactor):
        read_fd, write_fd = os.pipe()
        ended = []
        reactor.on_fd(read_fd, lambda: [ended.append(True), reactor.remove_fd(read_fd)])
        os.close(write_fd)
        assert reactor.run_until(lambda: ended, WAIT_S)
        os.close(read_fd)

    def test_a_handler_may_remove_one_that_was_ready_as_well(self, reactor):
        pipes = [os.pipe() for _ in range(2)]
        called = []
        for mine, other in ((0, 1), (1, 0)):
            reactor.on_fd(
                pipes[mine][0],
                lambda mine=mine, other=other: [called.append(mine), reactor.remove_fd(pipes[other][0])],
            )
            os.write(pipes[mine][1], b"x")
        reactor.run_until(lambda: called, WAIT_S)
        assert len(called) == 1
        for pair in pipes:
            for fd in pair:
                os.close(fd)

    def test_it_runs_until_the_flag_is_set(self, reactor):
        calls = []
        reactor.every(0.01, lambda: [calls.append(1), len(calls) == 3 and reactor.stop.request()])
        reactor.run()
        assert len(calls) == 3

    def test_the_flag_set_in_another_thread_wakes_it_at_once(self, reactor):
        threading.Timer(0.05, reactor.stop.request).start()
        start_s = time.monotonic()
        reactor.run()
        assert time.monotonic() - start_s < 5

    def test_run_until_goes_on_after_the_flag_and_ends_in_time(self, reactor):
        reactor.stop.request()
        assert not reactor.run_until(lambda: False, 0.05)
        done = []
        reactor.call_later(0.01, lambda: done.append(True))
        assert reactor.run_until(lambda: done, WAIT_S)

    def test_waiting_costs_no_processor_time(self, reactor):
        reactor.every(0.01, lambda: None)
        reactor.run_until(lambda: False, 0.1)
        before_s = time.thread_time()
        reactor.run_until(lambda: False, 1.0)
        assert time.thread_time() - before_s < 0.1


def test_importing_the_messaging_package_loads_no_heavy_library():
    code = "import sys, common.messaging.reactor; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["numpy", "torch", "rich", "structlog", "asyncio", "hashlib", "zmq.auth"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[]\n"
