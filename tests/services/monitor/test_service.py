"""Following the job table on an output that is not a terminal."""

import pytest

from common.protocol import JobTable
from common.types import JobState
from services.monitor.service import ChangeLines, JobChanges, follow, print_table
from tests.services.monitor.test_view import row, table


def test_following_shows_each_table_and_returns_the_first_for_which_the_condition_holds() -> None:
    tables = [table(row(1, JobState.PENDING)), table(row(1)), table(row(1, JobState.COMPLETED))]
    shown: list[JobTable] = []
    found = follow(lambda: tables[len(shown)], shown.append, lambda seen: seen.jobs[0].state.terminal)
    assert found is tables[2]
    assert shown == tables


def test_only_changes_of_the_named_jobs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show = JobChanges({"job-2"})
    show(table(row(1), row(2)))
    show(table(row(1, JobState.COMPLETED), row(2)))
    show(table(row(1, JobState.COMPLETED), row(2, JobState.COMPLETED)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines] == [["job-2", "running"], ["job-2", "completed"]]


def test_a_status_line_is_printed_at_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    show = ChangeLines()
    for now_s in (130.0, 134.0, 136.0):
        show(table(row(1), now_s=now_s))
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "slots in use" in line]) == 2


def test_a_table_is_printed_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(table(row(1)))
    status, heading, job = capsys.readouterr().out.splitlines()
    assert "slots in use" in status
    assert heading.startswith("JOB")
    assert job.startswith("job-1")
