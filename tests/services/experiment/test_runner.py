"""The record of a run, without a real stack."""

import os
from pathlib import Path

import pytest
from msgspec import structs

from common.config import Config
from common.lifecycle import UserError
from services.experiment import runner
from services.experiment.folder import RUN_FILE, ExperimentFolder, code_digest
from services.experiment.plan import ISOLATED_POLICY, Definition, PlannedRun, plan_runs
from services.experiment.runner import RunTask, perform

DEFINITION = Definition(policies=("fixed",), sets=("tail",), seeds=(1,), name="some")
(PLANNED,) = plan_runs(DEFINITION)
ALONE = PlannedRun(set="isolated-matfac-2", policy=ISOLATED_POLICY, seed=1, is_isolated=True)


def task(place: Path, monkeypatch: pytest.MonkeyPatch, run: PlannedRun, code: str) -> RunTask:
    """A task whose run ends at once and is clean."""

    def attempt(task: RunTask, check: object) -> tuple[dict[str, object], float]:
        config = runner._configured(task)
        config.run_dir(config.run.run_id).mkdir(parents=True)
        return {"verified": True, "audit_clean": True}, 7.0

    monkeypatch.setattr(runner, "_attempt", attempt)
    monkeypatch.setattr(runner, "wait_until_quiet", lambda *_: "")
    return RunTask(
        run=run,
        workload="",
        folder=str(place),
        definition=DEFINITION,
        config=Config(),
        command_pid=os.getpid(),
        code_digest=code,
    )


@pytest.mark.parametrize("run", [PLANNED, ALONE], ids=lambda run: run.name)
def test_the_record_of_a_run_is_next_to_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: PlannedRun
) -> None:
    outcome = perform(task(tmp_path, monkeypatch, run, code_digest()))
    assert (outcome.mean_jct_s, outcome.record.clean) == (7.0, True)
    assert ExperimentFolder(tmp_path, DEFINITION).records([run]) == {run: outcome.record}


def test_only_the_named_policies_have_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = structs.replace(DEFINITION, policies=("fixed", "pollux"), memory=("pollux",))
    having = {}
    for run in (*plan_runs(definition), ALONE):
        of_run = structs.replace(task(tmp_path, monkeypatch, run, ""), definition=definition)
        having[run.name] = runner._configured(of_run).collector.memory
    assert having == {"tail-fixed-1": False, "tail-pollux-1": True, ALONE.name: False}


def test_a_run_does_not_count_if_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"tail-fixed-1: the code of coadapt was changed during"):
        perform(task(tmp_path, monkeypatch, PLANNED, "sha256:former"))
    assert (tmp_path / PLANNED.name).exists()
    assert not (tmp_path / PLANNED.name / RUN_FILE).exists()
