"""The job table as people see it: on terminals of any size, as lines, and with hostile text."""

import io

import pytest
from rich.console import Console

from common.protocol import JobRow, JobTable
from common.types import JobConfig, JobState, Node, Placement
from services.monitor.view import change_lines, job_lines, render, status_line

NODES = (Node(name="node-1", slots=4, slot_speed=0.2), Node(name="node-2", slots=4, slot_speed=0.5))
HOSTILE = "[bold red]x[/nope] \x1b[2J\x1b]0;t\x07 a\nb\rc \u202e\u200b\t[link=http://x]"


def row(number: int, state: JobState = JobState.RUNNING, **changes: object) -> JobRow:
    runs = state in (JobState.STARTING, JobState.RUNNING, JobState.VERIFYING)
    values: dict[str, object] = {
        "id": f"job-{number}",
        "application": "digits-cnn",
        "state": state,
        "allocation": (Placement(node="node-1", replicas=1),) if runs else (),
        "config": JobConfig(atomic_batch=16, accumulation=1) if runs else None,
        "submitted_s": 100.0 + number,
        "ended_s": 200.0 + number if state.terminal else None,
        "progress": 50.0,
        "max_progress": 200.0,
        "metric": 0.5,
        "target": 0.9,
        "restarts": 0,
        "reason": f"reason of {number}",
    }
    return JobRow(**{**values, **changes})  # type: ignore[arg-type]


def table(*rows: JobRow, **changes: object) -> JobTable:
    values: dict[str, object] = {
        "run_id": "run-1",
        "policy": "pollux",
        "now_s": 130.0,
        "rounds": 7,
        "nodes": NODES,
        "jobs": rows,
    }
    return JobTable(**{**values, **changes})  # type: ignore[arg-type]


def drawn(shown: JobTable, width: int = 140, height: int = 40, colour: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        legacy_windows=False,
    )
    console.print(render(shown, width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_table_shows_each_job_with_its_slots_batch_metric_and_last_decision():
    placed = (Placement(node="node-1", replicas=2), Placement(node="node-2", replicas=1))
    lines = drawn(table(row(1, allocation=placed), row(2, JobState.PENDING, metric=None)))
    running, waiting = (next(line for line in lines if f"job-{number}" in line) for number in (1, 2))
    for text in ("digits-cnn", "running", "node-1:2 node-2:1", "96", "0.5 of 0.9", "reason of 1"):
        assert text in running
    for text in ("pending", "target 0.9", "reason of 2"):
        assert text in waiting
    assert "run-1  pollux, round 7: 1 pending, 1 running" in lines[0]


def test_the_table_shows_how_many_slots_of_each_node_are_in_use():
    both = (Placement(node="node-1", replicas=3), Placement(node="node-2", replicas=1))
    lines = drawn(table(row(1, allocation=both), row(2), row(3, JobState.COMPLETED, allocation=both)))
    assert lines[1] == "node-1  ■■■■  4/4  speed 0.2"
    assert lines[2] == "node-2  ■□□□  1/4  speed 0.5"


def test_an_allocation_larger_than_its_node_is_shown():
    assert "5/4" in drawn(table(row(1, allocation=(Placement(node="node-1", replicas=5),))))[1]


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("height", [1, 5, 24, 60])
def test_500_jobs_fit_every_terminal(width, height):
    rows = [row(number, list(JobState)[number % len(JobState)]) for number in range(500)]
    lines = drawn(table(*rows), width, height)
    assert len(lines) <= max(height, 6)
    assert all(len(line) <= width for line in lines)


def test_jobs_that_do_not_fit_are_counted_and_active_and_newest_jobs_come_first():
    ended = [row(number, JobState.COMPLETED) for number in range(30)]
    lines = drawn(table(*ended, row(30), row(31, JobState.PENDING)), height=14)
    shown = [line.split()[0] for line in lines if "job-" in line]
    assert shown == [f"job-{number}" for number in (30, 31, 29, 28, 27, 26, 25, 24)]
    assert "... and 24 more jobs: 24 completed" in lines[-1]


def test_nodes_that_do_not_fit_are_summed_up():
    nodes = tuple(Node(name=f"node-{number}", slots=4, slot_speed=1.0) for number in range(1, 1001))
    lines = drawn(table(row(1), row(2), nodes=nodes), height=20)
    assert len(lines) < 20
    assert lines[1].startswith("node-1  ■■□□")
    assert lines[5] == "996 more nodes  0/3984"


def test_a_cluster_without_nodes_and_jobs_can_be_shown():
    empty = table(nodes=(), jobs=())
    assert "no jobs" in drawn(empty)[0]
    assert "no nodes" in status_line(empty)
    assert len(job_lines(empty)) == 1
    assert change_lines(None, empty) == []


@pytest.mark.parametrize("field", ["id", "application", "reason"])
def test_text_of_users_is_never_markup_and_never_moves_the_cursor(field):
    hostile = table(row(1, **{field: HOSTILE}), run_id=HOSTILE, policy=HOSTILE)
    view = "\n".join(drawn(hostile, width=400))
    assert "[bold red]x[/nope]" in view
    for line in [*view.splitlines(), *job_lines(hostile), *change_lines(None, hostile), status_line(hostile)]:
        assert line.isprintable()
    assert "\x1b]0" not in "\n".join(drawn(hostile, width=400, colour=True))


def test_hostile_node_names_are_harmless():
    hostile = table(
        row(1, allocation=(Placement(node=HOSTILE, replicas=1),)),
        nodes=(Node(name=HOSTILE, slots=2, slot_speed=1.0),),
    )
    for line in [
        *drawn(hostile, width=400),
        *job_lines(hostile),
        *change_lines(None, hostile),
        status_line(hostile),
    ]:
        assert line.isprintable()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1e300])
def test_unusual_numbers_can_be_shown(number):
    odd = table(row(1, metric=number, progress=number), row(2, max_progress=number), now_s=number)
    assert len(drawn(odd)) > 5
    assert len(job_lines(odd)) == 3
    assert change_lines(None, odd)


def test_job_lines_are_aligned_in_columns():
    lines = job_lines(table(row(1), row(22, JobState.PENDING)))
    assert [line.index("digits-cnn") for line in lines[1:]] == [lines[0].index("APPLICATION")] * 2
    assert [line.index("reason of") for line in lines[1:]] == [lines[0].index("LAST DECISION")] * 2


def test_only_changes_of_state_slots_or_batch_make_a_line():
    old = table(row(1), row(2), row(3), row(4, JobState.PENDING))
    new = table(
        row(1, progress=60.0, metric=0.6, reason="as before"),
        row(2, config=JobConfig(atomic_batch=64)),
        row(3, allocation=(Placement(node="node-2", replicas=4),)),
        row(4),
        row(5, JobState.PENDING),
        now_s=131.5,
    )
    lines = change_lines(old, new)
    assert [line.split()[1] for line in lines] == ["job-2", "job-3", "job-4", "job-5"]
    assert (
        lines[0] == "  30.5s  job-2  running  node-1:1  batch 64  progress 50/200  0.5 of 0.9  (reason of 2)"
    )
    assert change_lines(new, new) == []
    assert len(change_lines(None, new)) == 5


def test_the_status_line_describes_the_run():
    placed = (Placement(node="node-2", replicas=3),)
    line = status_line(table(row(1, allocation=placed), row(2, JobState.COMPLETED)))
    assert (
        line.strip() == "29.0s  pollux, round 7: 1 running, 1 completed; slots in use: node-1 0/4, node-2 3/4"
    )


def test_ended_jobs_left_out_of_the_table_are_counted():
    shown = table(row(1, JobState.COMPLETED), row(2), left_out=4000)
    assert "1 completed, and 4000 that ended earlier" in status_line(shown)
    assert "4000 that ended earlier" in drawn(shown)[0]
    assert job_lines(shown)[1] == "(4000 that ended earlier)"
    assert len(job_lines(shown)) == 4
    assert len(job_lines(table(row(1), row(2)))) == 3
