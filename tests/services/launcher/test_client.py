"""Waiting for the jobs of a workload, with a job table that has only the newest of the ended jobs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from common.config import Config
from common.messaging import request_reply
from common.protocol import CancelJob, JobAccepted, JobTable, SubmitJob
from services.launcher.client import Arrivals, Client
from services.scheduler.state import job_table
from tests.fixtures.scheduler_driver import Driver, ScriptedPolicy, make_spec
from workloads.files.workload_file import Arrival, Workload


class LocalClient(Client):
    """Gives its requests to a core in this process."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def ask(self, request: Any, kind: type[Any]) -> Any:
        reply = self.driver.give(request)
        assert isinstance(reply, kind)
        return reply


@pytest.fixture
def driver() -> Driver:
    return Driver(ScriptedPolicy())


@pytest.fixture
def arrivals(driver: Driver) -> Arrivals:
    rows = tuple(Arrival(at_s=0.0, spec=make_spec(name)) for name in ("mine-1", "mine-2"))
    return Arrivals(LocalClient(driver), Workload(name="two", seed=1, rows=rows))


@pytest.fixture
def table(driver: Driver) -> Callable[[], JobTable]:
    """A table of the active jobs and of the newest ended one."""
    return lambda: job_table(driver.state, driver.now_s, "scripted", 1)


def end(driver: Driver, *job_ids: str) -> None:
    for job_id in job_ids:
        driver.give(CancelJob(job_id=job_id))


def test_a_job_that_is_no_longer_in_the_table_has_ended_and_is_remembered(driver, arrivals, table):
    arrivals.submit_due()
    assert not arrivals.all_ended(table())
    end(driver, "mine-1")
    assert not arrivals.all_ended(table())
    driver.submit(make_spec("other"))
    end(driver, "other", "mine-2")
    assert [row.id for row in table().jobs] == ["mine-2"]
    assert arrivals.all_ended(table())
    assert arrivals.failures(table()) == [
        "mine-1: cancelled: cancelled on request",
        "mine-2: cancelled: cancelled on request",
    ]


def test_a_job_that_ended_before_it_was_seen_is_not_a_success(driver, arrivals, table):
    for name in ("mine-1", "mine-2", "other"):
        driver.submit(make_spec(name))
    end(driver, "mine-1", "mine-2", "other")
    arrivals.submit_due()
    assert driver.give(SubmitJob(spec=make_spec("mine-1"))) == JobAccepted(job_id="mine-1", duplicate=True)
    assert arrivals.all_ended(table())
    assert arrivals.failures(table()) == [
        "mine-1: ended too long ago; only the event log says how",
        "mine-2: ended too long ago; only the event log says how",
    ]


def test_jobs_that_were_not_submitted_have_not_ended(arrivals, table):
    assert not arrivals.all_ended(table())
    assert arrivals.failures(table()) == [
        "mine-1: not submitted before the timeout",
        "mine-2: not submitted before the timeout",
    ]


def test_ctrl_c_while_a_client_connects_ends_it(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(request_reply, "connect_socket", interrupted)
    ended = threading.Event()

    def ask() -> None:
        try:
            with Client(Config()) as client:
                client.jobs()
        except KeyboardInterrupt:
            ended.set()

    threading.Thread(target=ask, daemon=True).start()
    assert ended.wait(10)
