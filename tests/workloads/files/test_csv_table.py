"""Workload tables: what is read, what is an error of the file, and what the scheduler decides."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.specifications import make_application
from workloads.files.csv_table import COLUMNS, read_table
from workloads.files.workload_file import Workload, WorkloadError, check_spec

APPLICATION = make_application(
    "tiny", initial_batch_size=32, max_batch_size=512, min_atomic_batch=8, max_progress=300.0
)
APPLICATIONS = {"tiny": APPLICATION}
HEADER = ",".join(COLUMNS)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def read(table: Path, *rows: str, header: str = HEADER) -> Workload:
    table.write_bytes("\n".join([header, *rows]).encode())
    return read_table(table, APPLICATIONS)


def problem(table: Path, *rows: str, header: str = HEADER) -> str:
    with pytest.raises(WorkloadError) as raised:
        read(table, *rows, header=header)
    text = str(raised.value)
    assert text.startswith(f"{table}: ")
    assert "\n" not in text
    assert len(text) < 500
    return text.removeprefix(f"{table}: ")


def test_a_row_is_a_job_complete_with_what_its_application_says(table: Path) -> None:
    workload = read(table, "a,107,tiny,6,256")
    (row,) = workload.rows
    assert workload.name == "table"
    assert row.at_s == 107.0
    assert (row.spec.id, row.spec.replicas, row.spec.batch_size) == ("a", 6, 256)
    assert (row.spec.target, row.spec.max_progress, row.spec.min_batch_size) == (0.9, 300.0, 32)
    assert check_spec(row.spec, APPLICATIONS, slots=8) == []


def test_rows_come_in_order_of_time_and_those_of_one_time_in_the_order_of_the_file(table: Path) -> None:
    workload = read(table, "late,9.5,tiny,1,32", "b,3,tiny,1,32", "a,3,tiny,1,32", "first,0,tiny,1,32")
    assert [row.spec.id for row in workload.rows] == ["first", "b", "a", "late"]


def test_byte_order_marks_windows_lines_quotes_blank_lines_and_the_order_of_columns_do_not_matter(
    table: Path,
) -> None:
    table.write_bytes(
        b"\xef\xbb\xbfbatch_size,name, application,time,num_replicas\r\n\r\n256,a,tiny,1e2,2\r\n"
        b'"256", "b",tiny ,7, 2\r\n'.replace(b' "b"', b'"b"')
        + b"\r\n"
    )
    workload = read_table(table, APPLICATIONS)
    assert [(row.at_s, row.spec.id, row.spec.batch_size) for row in workload.rows] == [
        (7.0, "b", 256),
        (100.0, "a", 256),
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("b,nan,tiny,1,32", "time 'nan': allowed: 0 to 1000000000 seconds"),
        ("b,inf,tiny,1,32", "time 'inf': allowed: 0 to 1000000000 seconds"),
        ("b,-1,tiny,1,32", "time '-1': allowed: 0 to 1000000000 seconds"),
        ("b,1e300,tiny,1,32", "time '1e300': allowed: 0 to 1000000000 seconds"),
        ("b,,tiny,1,32", "time '': allowed: 0 to 1000000000 seconds"),
        ("b,1_0,tiny,1,32", "time '1_0': allowed: 0 to 1000000000 seconds"),
        ("b,0,tiny,two,32", "num_replicas 'two': allowed: whole numbers from 1 to 2147483647"),
        ("b,0,tiny,nan,32", "num_replicas 'nan': allowed: whole numbers from 1 to 2147483647"),
        ("b,0,tiny,0,32", "num_replicas '0': allowed: whole numbers from 1 to 2147483647"),
        ("b,0,tiny,-3,32", "num_replicas '-3': allowed: whole numbers from 1 to 2147483647"),
        ("b,0,tiny,1,0", "batch_size '0': allowed: whole numbers from 1 to 2147483647"),
        ("b,0,tiny,1,32.5", "batch_size '32.5': allowed: whole numbers from 1 to 2147483647"),
        ("b,0,tiny,1,99999999999999999999", "batch_size '99999999999999999999': allowed: whole numbers"),
        ("b,0,huge,1,32", "application 'huge': no such application; allowed: tiny"),
        ("a,5,tiny,2,64", "name 'a': already used in row 1; allowed: each name once"),
        ("b,0,tiny,1", "4 cells; allowed: 5, as in the header"),
        ("b,0,tiny,1,32,7", "6 cells; allowed: 5, as in the header"),
        (",0,tiny,1,32", "name '': allowed: 1 to 64 of"),
        ("x" * 300 + ",0,tiny,1,32", "name 'xxx"),
        ("[bold]b[/],0,tiny,1,32", "name '[bold]b[/]': allowed: 1 to 64 of"),
        ("../b,0,tiny,1,32", "name '../b': allowed: 1 to 64 of"),
    ],
)
def test_a_bad_row_is_named_with_its_number_its_line_the_value_and_what_is_allowed(
    table: Path, row: str, complaint: str
) -> None:
    assert problem(table, "a,0,tiny,1,32", "", row).startswith(f"row 2 (line 4): {complaint}")


def test_control_characters_of_a_cell_never_reach_the_terminal(table: Path) -> None:
    text = problem(table, "b\x1b[2Jb,0,tiny,1,32")
    assert "\x1b" not in text
    assert text.startswith("row 1 (line 2): name 'b")


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("name,time,application,batch_size", "no column 'num_replicas'"),
        (f"{HEADER},colour", "unknown column 'colour'"),
        (f"{HEADER},time", "column 'time' 2 times"),
        ("a,0,tiny,1,32", "no column 'name'; no column 'time'"),
    ],
)
def test_a_header_that_is_not_the_five_columns_is_refused(table: Path, header: str, complaint: str) -> None:
    text = problem(table, "a,0,tiny,1,32", header=header)
    assert text.startswith(f"header: {complaint}")
    assert text.endswith("allowed: name, time, application, num_replicas, batch_size, each once")


def test_a_file_without_jobs_is_no_workload(table: Path) -> None:
    assert problem(table) == "no rows below the header; a workload needs at least one job"
    table.write_bytes(b"")
    with pytest.raises(WorkloadError, match="empty; allowed: a header name,time"):
        read_table(table, APPLICATIONS)


def test_a_file_that_is_not_text_or_not_a_file_is_named(table: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        read_table(table, APPLICATIONS)
    with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
        read_table(table.parent, APPLICATIONS)
    table.write_bytes(b"name,time\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not UTF-8 text"):
        read_table(table, APPLICATIONS)
    assert "line 3: not valid CSV" in problem(table, "a,0,tiny,1,32", 'b,0,"tiny,1,32')


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a,0,tiny,1,16", "batch_size 16: allowed: 32 to 512"),
        ("a,0,tiny,1,513", "batch_size 513: allowed: 32 to 512"),
        ("a,0,tiny,9,512", "replicas 9: allowed: at most 8, the slots of the cluster"),
        ("a,0,tiny,8,32", "batch_size 32: 8 replicas cannot share it with 8 to 64 examples a pass"),
    ],
)
def test_an_impossible_job_is_read_and_left_for_the_scheduler_to_refuse(
    table: Path, row: str, reason: str
) -> None:
    (arrival,) = read(table, row).rows
    (found,) = check_spec(arrival.spec, APPLICATIONS, slots=8)
    assert found.startswith(reason)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.text(alphabet='a1,."\n\r -_\x00\x1b', max_size=30), max_size=6).map(
            lambda rows: "\n".join([HEADER, *rows]).encode()
        ),
    )
)
def test_any_file_gives_jobs_or_one_line_of_complaint(table: Path, content: bytes) -> None:
    table.write_bytes(content)
    complaint = ""
    try:
        assert read_table(table, APPLICATIONS).rows
    except WorkloadError as error:
        complaint = str(error)
    assert not complaint or (complaint.startswith(f"{table}: ") and complaint.isprintable())
