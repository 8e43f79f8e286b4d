"""The `coadapt` command. It reads its arguments here and leaves the work to other modules, which each
command imports for itself, so that `coadapt --help` loads next to nothing."""

import errno
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from services.cli.bench_command import app as bench
from services.cli.calibrate_command import calibrate
from services.cli.compare_command import compare
from services.cli.experiment_command import experiment
from services.cli.fidelity_command import fidelity
from services.cli.options import integer, number, path_of, real
from services.cli.sensitivity_command import sensitivity
from services.cli.simulate_command import simulate
from services.cli.workload_command import app as workload

if TYPE_CHECKING:
    from common.config import Config
    from common.protocol import JobTable
    from services.launcher.client import Arrivals

MAX_LINE_CHARS = 1000
KEYS_ADVICE = """
What to do with them, each process having its files in a folder that its endpoints.keys_dir names:
  scheduler, metrics-collector, event-logger: server.key, server.key_secret, the NAME.key of everybody whom
    they serve, and NAME.key with NAME.key_secret of one name to connect with
  agents and clients: server.key, and NAME.key with NAME.key_secret of one name
A .key_secret is for its owner alone; a .key may be shown to anybody."""

app = typer.Typer(
    name="coadapt",
    help="Co-adaptive scheduling of batch size and replicas on real training jobs.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.add_typer(workload)
app.command()(simulate)
app.command()(compare)
app.command()(calibrate)
app.command()(experiment)
app.command()(fidelity)
app.command()(sensitivity)


def main() -> None:
    """Entry point. Whatever a user did wrong ends as one line on stderr and an exit code."""
    # Applications of a user's own lie beside coadapt.toml, where services that run with -m find them as well.
    sys.path.insert(0, os.getcwd())
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="coadapt", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        code = _complain(error.format_message(), error.exit_code)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader of our output that has gone knows why.
        code = 1 if error.errno == errno.EPIPE else _complain(f"cannot write: {error.strerror}", 1)
    except Exception as error:
        from common.config import ConfigError
        from common.lifecycle import EXIT_BAD_INPUT, UserError

        if not isinstance(error, (UserError, ConfigError)):
            raise
        code = _complain(str(error), getattr(error, "exit_code", EXIT_BAD_INPUT))
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from common import __version__

        print(f"coadapt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# --------------------------------------------------------------------------- commands


@app.command()
def submit(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=path_of,
            metavar="FILE",
            help="Workload file (TOML); every job is submitted when its at_s has come.",
        ),
    ] = None,
    application: Annotated[
        str | None, typer.Option("--app", help="Submit one job of this application.")
    ] = None,
    job_id: Annotated[str | None, typer.Option("--id", help="Id of the job.")] = None,
    seed: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Seed of its data, weights and order.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(parser=real, metavar="X", help="Metric on held-out data that ends it.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Replicas to ask for.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Total batch size to ask for.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(parser=integer, metavar="N", help="Most replicas a policy may give.")
    ] = None,
    max_progress: Annotated[
        float | None,
        typer.Option(parser=real, metavar="X", help="Budget, in steps at the initial batch size."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A number of the application's own."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the jobs have ended; exit 1 if one failed.")
    ] = False,
) -> int:
    """Submit the jobs of a FILE, or one with --app.

    A FILE's jobs arrive as it says: the command goes on until the last one's at_s seconds have passed."""
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
        raise typer.BadParameter("either a FILE or --app is needed, and not both")
    if file is not None and given:
        raise typer.BadParameter(
            f"{', '.join(given)}: only with --app; the jobs of a FILE are described in it"
        )
    from services.launcher.client import Arrivals, Client, workload_reader
    from services.monitor.service import JobChanges, follow

    config = _config()
    read = workload_reader(config, file, given)
    read(None)  # refuses what is wrong on any cluster before anybody is asked
    with Client(config) as client:
        arrivals = Arrivals(client, read(client.slots()))
        while (wait_s := arrivals.submit_due()) < math.inf:
            time.sleep(wait_s)
        if not wait:
            return 0
        return _verdict(arrivals, follow(client.jobs, JobChanges(arrivals.job_ids), arrivals.all_ended))


@app.command()
def jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole job table as JSON.")] = False,
) -> None:
    """List the jobs of the running scheduler."""
    from services.launcher.client import Client

    with Client(_config()) as client:
        table = client.jobs()
    if as_json:
        import msgspec

        print(msgspec.json.encode(table).decode())
    else:
        from services.monitor.view import job_lines

        print(*job_lines(table), sep="\n")


@app.command()
def cancel(job_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the job.")]) -> None:
    """Cancel a job; its slots are free at once."""
    from common.protocol import CancelJob, Done
    from services.launcher.client import Client

    with Client(_config()) as client:
        client.ask(CancelJob(job_id=job_id), Done)
    print(f"{job_id}: cancelled")


@app.command()
def watch(
    once: Annotated[bool, typer.Option("--once", help="Show the present state and exit.")] = False,
) -> None:
    """Follow jobs, slots and decisions until Ctrl-C.

    A live table on a terminal, lines of changes elsewhere."""
    from services.launcher.client import Client
    from services.monitor.service import follow, print_table, screen

    with Client(_config()) as client:
        if once:
            print_table(client.jobs())
            return
        with screen() as show:
            follow(client.jobs, show, until=lambda table: False)


@app.command()
def keys(
    folder: Annotated[
        Path, typer.Argument(parser=path_of, metavar="DIR", help="Folder for the keys; made if need be.")
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME ...", help='One pair of keys each; "client" if none is given.'),
    ] = None,
) -> None:
    """Make CURVE keys, for endpoints that other machines reach.

    Keys that are there already are kept."""
    from common.messaging.curve_keys import make_keys

    _check_key_names(names or [])
    try:
        made = make_keys(folder, names or ["client"])
    except OSError as error:
        raise typer.BadParameter(f"{folder}: cannot be written: {error.strerror}") from error
    for path in made:
        print(path)
    if not made:
        print(f"{folder}: all of these keys are there already")
    print(KEYS_ADVICE)


@app.command()
def summarize(
    logs: Annotated[
        Path, typer.Argument(parser=path_of, metavar="DIR", help="A run's folder, or one with runs in it.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of runs as JSON.")] = False,
) -> int:
    """Sum up and audit finished runs by their logs.

    Exit 1 when an audit finds anything."""
    return _summarize(logs, as_json)


@app.command()
def run(
    file: Annotated[Path, typer.Argument(parser=path_of, metavar="FILE", help="Workload file (TOML).")],
    policy: Annotated[str | None, typer.Option(help="Policy, instead of the configuration's.")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            parser=number(0.0, math.inf, "seconds, 0 or more"),
            metavar="S",
            help="Seconds after which jobs that go on have failed.",
        ),
    ] = None,
) -> int:
    """Run FILE on a stack of its own, and sum up.

    The stack is brought up for it, and taken down when every job has ended, and on Ctrl-C.

    Exit 0 only when every job was completed and verified and the audit of the log is clean."""
    from common.lifecycle import signals_as_interrupt
    from services.launcher.client import Arrivals, Client, workload_reader
    from services.launcher.stack import Stack
    from services.monitor.service import follow, screen

    config = _config()
    read = workload_reader(config, file, {})
    workload = read(None)
    config = _with(config, "run", workload=workload.name, seed=config.run.seed or workload.seed)
    config = _with(config, "scheduler", policy=policy or config.scheduler.policy)
    _check_policy(config.scheduler.policy)
    stack = Stack(config, os.environ)
    try:
        with signals_as_interrupt(), stack, Client(stack.config) as client:
            print(f"run {stack.run_id}: the stack is up; its output is in {stack.output}", flush=True)
            arrivals = Arrivals(client, read(client.slots()))
            over = arrivals.over(math.inf if timeout_s is None else timeout_s)
            with screen() as show:
                code = _verdict(arrivals, follow(stack.jobs, show, over))
    except KeyboardInterrupt:
        print(f"interrupted: the stack is down; what the run has logged is in {stack.run_dir}", flush=True)
        raise
    for process in stack.killed:
        _complain(f"had to be killed: {process}", 1)
    return max(code, _summarize(stack.run_dir, as_json=False))


# --------------------------------------------------------------------------- what commands share


def _config() -> "Config":
    from common.config import load_config

    return load_config(os.environ)


def _with(config: "Config", section: str, **values: object) -> "Config":
    from msgspec.structs import replace

    return replace(config, **{section: replace(getattr(config, section), **values)})


def _check_policy(name: str) -> None:
    from common.lifecycle import UserError
    from services.scheduler.policies.registry import UnknownPolicy, make_live_policy

    try:
        make_live_policy(name)
    except UnknownPolicy as error:
        raise UserError(str(error)) from error


def _check_key_names(names: list[str]) -> None:
    from common.messaging.curve_keys import SERVER
    from common.types import MAX_NAME_CHARS, NAME_PATTERN

    for name in names:
        if len(name) > MAX_NAME_CHARS or name == SERVER or not NAME_PATTERN.fullmatch(name):
            raise typer.BadParameter(
                f"NAME {name[:MAX_NAME_CHARS]!r}: allowed: at most {MAX_NAME_CHARS} letters, digits, '_', "
                f"'.', '-', a letter or digit first and last; {SERVER!r} is always made"
            )


def _settings(pairs: list[str]) -> dict[str, float]:
    settings = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            settings[key] = float(text)
        except ValueError:
            raise typer.BadParameter(f"--set {pair!r}: allowed: KEY=NUMBER") from None
    return settings


def _verdict(arrivals: "Arrivals", table: "JobTable") -> int:
    """0 when all of these jobs were completed and verified, else 1, and a line on each that was not."""
    failures = arrivals.failures(table)
    for failure in failures:
        _complain(failure, 1)
    return 1 if failures else 0


def _summarize(logs: Path, as_json: bool) -> int:
    from analysis.summarize import main as summarize_logs

    return summarize_logs([str(logs), *(["--json"] if as_json else [])])


def _complain(text: str, code: int) -> int:
    from common.codec import printable

    lines = [printable(line, MAX_LINE_CHARS) for line in text.splitlines()]
    print("coadapt: " + "\n".join(lines), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
