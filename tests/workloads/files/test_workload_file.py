import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import JobSpec, batch_config
from tests.fixtures.specifications import make_application
from workloads import applications as tasks
from workloads.files.workload_file import WorkloadError, check_spec, read_workload, single_job

DIGITS = make_application("digits", target_max=0.95, max_progress=2000.0, settings={"learning_rate": 0.1})
APPLICATIONS = {"digits": DIGITS}
GOOD = single_job({"application": "digits"}, "digits-1", APPLICATIONS).rows[0].spec
HOSTILE_NAMES = (
    "",
    "a/b",
    "..",
    "a..b",
    "a\nb",
    "a\x1b[31mb",
    "[red]a[/red]",
    "a b",
    "-a",
    "a-",
    ".a",
    "é",
    "\u202ea",
    "a" * 65,
    "a" * 300,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "set.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, slots: int | None = None) -> str:
    with pytest.raises(WorkloadError) as caught:
        read_workload(written(folder, text), APPLICATIONS, slots)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 600
    return message


def job(line: str = "") -> str:
    return f"[[job]]\napplication = 'digits'\n{line}\n"


def test_a_row_with_only_an_application_gets_everything_else_from_it(tmp_path):
    workload = read_workload(written(tmp_path, job()), APPLICATIONS)
    assert workload.name == "set"
    (row,) = workload.rows
    assert row.at_s == 0.0
    assert row.spec == JobSpec(
        id="digits-1",
        application="digits",
        seed=1,
        target=0.9,
        max_progress=2000.0,
        replicas=1,
        batch_size=16,
        min_batch_size=16,
        max_batch_size=256,
        min_atomic_batch=4,
        max_atomic_batch=64,
        max_replicas=64,
    )


def test_a_row_overrides_the_defaults(tmp_path):
    text = """
        name = "mine"
        seed = 7
        [[job]]
        id = "late"
        application = "digits"
        at_s = 3
        seed = 5
        target = 0.8
        replicas = 2
        batch_size = 64
        max_replicas = 4
        max_progress = 100
        min_batch_size = 32
        max_batch_size = 128
        min_atomic_batch = 8
        max_atomic_batch = 32
        settings = { learning_rate = 0.5 }
    """
    workload = read_workload(written(tmp_path, text), APPLICATIONS)
    assert (workload.name, workload.seed) == ("mine", 7)
    (row,) = workload.rows
    assert row.at_s == 3.0
    assert msgspec.structs.astuple(row.spec) == (
        *("late", "digits", 5, 0.8, 100.0, 2, 64, 32, 128, 8, 32, 4),
        {"learning_rate": 0.5},
    )


def test_rows_are_in_order_of_arrival_and_simultaneous_ones_in_that_of_the_file(tmp_path):
    text = job("at_s = 2.0") + job("at_s = 0.5") + job("at_s = 0.5")
    rows = read_workload(written(tmp_path, text), APPLICATIONS).rows
    assert [row.spec.id for row in rows] == ["digits-2", "digits-3", "digits-1"]


def test_jobs_of_one_workload_have_different_seeds_and_the_same_ones_every_time(tmp_path):
    path = written(tmp_path, "seed = 3\n" + job() + job())
    first = read_workload(path, APPLICATIONS)
    assert [row.spec.seed for row in first.rows] == [4, 5]
    assert read_workload(path, APPLICATIONS) == first


def test_replicas_that_cannot_share_m0_get_the_smallest_batch_they_can_share(tmp_path):
    (row,) = read_workload(written(tmp_path, job("replicas = 8")), APPLICATIONS).rows
    assert row.spec.batch_size == 32


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("target = 0.99", "target 0.99: allowed: 0.5 to 0.95"),
        ("target = nan", "target nan: allowed: 0.5 to 0.95"),
        ("target = inf", "target inf: allowed"),
        ("max_progress = nan", "max_progress nan: allowed: above 0"),
        ("max_progress = 0", "max_progress 0.0: allowed: above 0"),
        ("at_s = -1", "at_s -1.0: allowed: 0 to 1000000000"),
        ("at_s = inf", "at_s inf: allowed"),
        ("at_s = 1e15", "at_s 1000000000000000.0: allowed: 0 to 1000000000"),
        ("seed = -1", "seed -1: allowed: 0 to 2147483647"),
        ("replicas = 0", "replicas 0: allowed: 1 to 64"),
        ("replicas = 65", "batch_size 260"),
        ("replicas = 3\nmax_replicas = 2", "replicas 3: allowed: 1 to 2"),
        ("max_replicas = 65", "max_replicas 65: allowed: 1 to 64"),
        ("max_replicas = 0", "max_replicas 0: allowed: 1 to 64"),
        ("batch_size = 8", "batch_size 8: allowed: 16 to 256"),
        ("batch_size = 257", "batch_size 257: allowed: 16 to 256"),
        ("batch_size = 16\nreplicas = 8", "batch_size 16: 8 replicas cannot share it"),
        ("min_batch_size = 15", "min_batch_size 15: allowed: 16 to 256"),
        ("max_batch_size = 257", "max_batch_size 257: allowed: 16 to 256"),
        ("min_batch_size = 64\nmax_batch_size = 32", "max_batch_size 32: allowed: 64 to 256"),
        ("min_atomic_batch = 3", "min_atomic_batch 3: allowed: 4 to 64"),
        ("min_atomic_batch = 0", "min_atomic_batch 0: allowed: 4 to 64"),
        ("max_atomic_batch = 65", "max_atomic_batch 65: allowed: 4 to 64"),
        ("min_atomic_batch = 8\nmax_atomic_batch = 5", "max_atomic_batch 5: allowed: 8 to 64"),
        (
            "min_batch_size = 17\nmax_batch_size = 17\nmin_atomic_batch = 7\nmax_atomic_batch = 8",
            "min_batch_size 17 to max_batch_size 17: no number of replicas meets this",
        ),
        ("settings = { rate = 1.0 }", "settings: 'rate': no such setting of digits; allowed: learning_rate"),
        ("settings = { learning_rate = nan }", "settings: learning_rate nan: allowed: finite"),
        ("settings = { learning_rate = 'x' }", "settings {'learning_rate': 'x'}: Expected"),
        ("replica = 1", "'replica': no such key; allowed: application, id"),
        ("replicas = '2'", "replicas '2': Expected `int"),
        ("replicas = true", "replicas True: Expected `int"),
        ("replicas = 1.5", "replicas 1.5: Expected `int"),
        (f"replicas = 1{'0' * 30}", "replicas 1000"),
    ],
)
def test_a_bad_field_is_refused_with_its_row_its_name_its_value_and_what_is_allowed(tmp_path, line, told):
    message = refusal(tmp_path, job() + job(line))
    assert "set.toml: job 2: " in message
    assert told in message


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_refused_in_every_field(tmp_path, name):
    quoted = msgspec.json.encode(name).decode().replace("\u202e", "\\u202e")
    assert "id" in refusal(tmp_path, job(f"id = {quoted}"))
    assert "name" in refusal(tmp_path, f"name = {quoted}\n{job()}")
    assert "no such application; allowed: digits" in refusal(tmp_path, f"[[job]]\napplication = {quoted}")
    assert check_spec(msgspec.structs.replace(GOOD, id=name), APPLICATIONS, None)
    assert check_spec(msgspec.structs.replace(GOOD, application=name), APPLICATIONS, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[job]\n", "set.toml: not valid TOML: "),
        ("x" * 100_000, "not valid TOML"),
        ("a = " + "[" * 20_000, "not valid TOML"),
        ("", "no [[job]] in it"),
        ("job = 3", "job 3: Expected `array`"),
        ("job = [1]", "job [1]: Expected `object`"),
        ("jobs = 1", "'jobs': no such key; allowed: name, seed, job"),
        ("name = 1\n" + job(), "name 1: Expected `str"),
        ("seed = -1\n" + job(), "seed -1: allowed: 0 to"),
        ("[[job]]\nreplicas = 1", "job 1: application: missing; it is required"),
        (job("id = 'a'") + job("id = 'a'"), "job 2: id 'a': used by job 1 with another specification"),
    ],
)
def test_a_file_that_is_not_a_workload_is_refused_in_one_line(tmp_path, text, told):
    assert told in refusal(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(WorkloadError, match="cannot be read"):
            read_workload(path, APPLICATIONS)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00[[job]]")
    with pytest.raises(WorkloadError, match="not valid TOML"):
        read_workload(binary, APPLICATIONS)


def test_the_same_job_twice_is_the_same_job(tmp_path):
    text = job("id = 'a'\nseed = 1") * 2
    assert len(read_workload(written(tmp_path, text), APPLICATIONS).rows) == 2


def test_more_replicas_than_slots_are_refused_where_the_slots_are_known(tmp_path):
    assert "replicas 9: allowed: at most 8, the slots" in refusal(tmp_path, job("replicas = 9"), slots=8)
    assert read_workload(written(tmp_path, job("replicas = 8")), APPLICATIONS, 8)
    assert read_workload(written(tmp_path, job("replicas = 9")), APPLICATIONS)


def test_a_job_of_the_command_line_is_checked_as_one_of_a_file():
    workload = single_job({"application": "digits", "replicas": 2}, "digits-ab", APPLICATIONS, 8)
    assert workload.rows[0].spec.id == "digits-ab"
    assert single_job({"application": "digits", "id": "x"}, "unused", APPLICATIONS).rows[0].spec.id == "x"
    with pytest.raises(WorkloadError, match="replicas 9"):
        single_job({"application": "digits", "replicas": 9}, "digits-ab", APPLICATIONS, 8)


wild_int = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 300)
wild_float = st.floats() | st.floats(0.4, 1.0)


@given(
    st.builds(
        JobSpec,
        id=st.text(max_size=80) | st.just("a"),
        application=st.sampled_from(["digits", "unknown", ""]),
        seed=wild_int,
        target=wild_float,
        max_progress=wild_float,
        replicas=wild_int,
        batch_size=wild_int,
        min_batch_size=wild_int,
        max_batch_size=wild_int,
        min_atomic_batch=wild_int,
        max_atomic_batch=wild_int,
        max_replicas=wild_int,
        settings=st.dictionaries(st.text(max_size=5) | st.just("learning_rate"), st.floats()),
    ),
    st.none() | st.integers(0, 16),
)
def test_any_job_is_checked_without_an_exception_and_in_printable_lines(spec, slots):
    for problem in check_spec(spec, APPLICATIONS, slots):
        assert problem.isprintable()
        assert len(problem) < 400


@given(
    bounds=st.tuples(st.integers(16, 256), st.integers(16, 256)).map(sorted),
    atomic=st.tuples(st.integers(4, 64), st.integers(4, 64)).map(sorted),
    replicas=st.integers(1, 8),
    batch_size=st.integers(16, 256),
)
def test_an_accepted_request_can_be_trained_as_requested(bounds, atomic, replicas, batch_size):
    spec = msgspec.structs.replace(
        GOOD,
        min_batch_size=bounds[0],
        max_batch_size=bounds[1],
        min_atomic_batch=atomic[0],
        max_atomic_batch=atomic[1],
        max_replicas=max(bounds[1] // atomic[0], 1),
        replicas=replicas,
        batch_size=batch_size,
    )
    problems = check_spec(spec, APPLICATIONS, 8)
    feasible = any(
        bounds[0] <= atomic_batch * passes <= bounds[1]
        for atomic_batch in range(atomic[0], atomic[1] + 1)
        for passes in range(1, 257)
    )
    if problems:
        assert not feasible or any(field in " ".join(problems) for field in ("replicas", "batch_size"))
    else:
        assert feasible
        config = batch_config(batch_size, replicas, spec)
        assert atomic[0] <= config.atomic_batch <= atomic[1]
        assert bounds[0] <= config.total_batch(replicas) <= bounds[1]
        assert math.isclose(
            config.total_batch(replicas), batch_size, abs_tol=replicas * (config.accumulation + 1)
        )


def test_the_demo_is_a_workload_of_all_applications_that_fits_two_nodes_of_four_slots():
    applications = tasks.applications()
    workload = read_workload(Path(__file__).parents[3] / "workloads" / "sets" / "demo.toml", applications, 8)
    assert workload.name == "demo"
    assert {row.spec.application for row in workload.rows} == set(applications)
    assert 8 <= len(workload.rows) <= 10
    for row in workload.rows:
        assert row.spec.replicas <= 4
        assert row.spec.batch_size <= 4 * row.spec.min_batch_size
