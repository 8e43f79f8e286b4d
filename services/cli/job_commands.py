"""Commands for the jobs of a running scheduler: submit, jobs, cancel, watch."""

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.errors import report_failures
from services.cli.options import (
    JsonOption,
    integer_option,
    path_argument,
    real_option,
    repeated_option,
)

if TYPE_CHECKING:
    from services.launcher.client import Client


def submit(
    file: Annotated[
        Path | None, path_argument("Workload file (TOML). Each job is submitted at its at_s.", metavar="FILE")
    ] = None,
    application: Annotated[
        str | None,
        typer.Option("--app", metavar="NAME", help="Submit one job of this application instead of a FILE."),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Job id. Default: the application's name and six random characters."
        ),
    ] = None,
    seed: Annotated[
        int | None, integer_option("Seed of the job's data, weights and example order. Default: 0.")
    ] = None,
    target: Annotated[
        float | None,
        real_option(
            "Metric on held-out data at which the job is complete. Default: the application's target."
        ),
    ] = None,
    replicas: Annotated[int | None, integer_option("Requested number of replicas. Default: 1.")] = None,
    batch_size: Annotated[
        int | None,
        integer_option(
            "Requested total batch size, in examples. Default: the application's initial batch size, or the "
            "least that its replicas can share."
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        integer_option(
            "Largest number of replicas a policy may give the job. Default: the largest batch size over the "
            "smallest atomic batch size."
        ),
    ] = None,
    max_progress: Annotated[
        float | None,
        real_option(
            "Progress budget, in steps at the initial batch size; a job that spends it has failed. Default: "
            "the application's budget."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        repeated_option(
            "--set", "Setting of the application, for instance learning_rate=0.1.", metavar="KEY=NUMBER"
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the submitted jobs have ended.")] = False,
) -> int:
    """Submit the jobs of a workload file, or one job with --app.

    The jobs of a FILE are submitted at their arrival times (at_s, in seconds from the start of the
    command); the command ends after the last one. Submitting the same job id and specification twice is
    harmless.

    Exit codes: 0 success; 1 with --wait: a job was not completed and verified; 2 bad input; 3 the
    scheduler does not answer; 130 interrupted."""
    fields = {
        "application": application,
        "id": job_id,
        "seed": seed,
        "target": target,
        "replicas": replicas,
        "batch_size": batch_size,
        "max_replicas": max_replicas,
        "max_progress": max_progress,
        "settings": _settings(settings or []) or None,
    }
    given = {key: value for key, value in fields.items() if value is not None}
    if (file is None) == (application is None):
        raise typer.BadParameter("give either a FILE or --app, not both")
    if file is not None and given:
        raise typer.BadParameter(
            f"{', '.join(given)}: allowed only with --app; the jobs of a FILE are described in the file"
        )
    from common.config import load_config
    from services.launcher.client import Arrivals, Client, workload_reader
    from services.monitor.service import JobChanges, follow

    config = load_config(os.environ)
    read = workload_reader(config, file, given)
    read(None)  # refuse what is wrong on any cluster before the first request
    with Client(config) as client:
        arrivals = Arrivals(client, read(client.slots()))
        while (wait_s := arrivals.submit_due()) < math.inf:
            time.sleep(wait_s)
        if not wait:
            return 0
        table = follow(client.jobs, JobChanges(arrivals.job_ids), arrivals.all_ended)
        return report_failures(arrivals.failures(table))


def jobs(as_json: JsonOption = False) -> None:
    """List the jobs of the running scheduler.

    With --json the whole job table, with nodes and allocations.

    Exit codes: 0 success; 2 bad input; 3 the scheduler does not answer."""
    with _client() as client:
        table = client.jobs()
    if as_json:
        import msgspec

        print(msgspec.json.encode(table).decode())
    else:
        from services.monitor.view import job_lines

        print(*job_lines(table), sep="\n")


def cancel(job_id: Annotated[str, typer.Argument(metavar="ID", help="Job id.")]) -> None:
    """Cancel a job and free its slots.

    Exit codes: 0 success; 2 no such job, or it has already ended; 3 the scheduler does not answer."""
    from common.protocol import CancelJob, Done

    with _client() as client:
        client.ask(CancelJob(job_id=job_id), Done)
    print(f"{job_id}: cancelled")


def watch(
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Show jobs, slots and decisions until Ctrl-C.

    On a terminal this is a live table; elsewhere it is one line for each change.

    Exit codes: 0 success (--once); 2 bad input; 3 the scheduler does not answer; 130 interrupted."""
    from services.monitor.service import follow, print_table, screen

    with _client() as client:
        if once:
            print_table(client.jobs())
            return
        with screen() as show:
            follow(client.jobs, show, until=lambda table: False)


def _client() -> "Client":
    from common.config import load_config
    from services.launcher.client import Client

    return Client(load_config(os.environ))


def _settings(pairs: list[str]) -> dict[str, float]:
    settings = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            settings[key] = float(text)
        except ValueError:
            raise typer.BadParameter(f"--set {pair!r}: allowed: KEY=NUMBER") from None
    return settings
