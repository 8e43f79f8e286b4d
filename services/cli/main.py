"""The `coadapt` command: its commands, its entry point, and how errors become exit codes.

Commands import what they need in their bodies, so that `coadapt --help` loads only what parses the command
line.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from typer.exceptions import TyperException

from services.cli.analysis_commands import export, summarize
from services.cli.command_group import CommandGroup
from services.cli.compare_command import compare
from services.cli.errors import print_error
from services.cli.job_commands import cancel, jobs, submit, watch
from services.cli.measure_commands import bench, calibrate
from services.cli.run_commands import experiment, run
from services.cli.setup_commands import init, keys, workload
from services.cli.simulate_commands import fidelity, sensitivity, simulate

app = typer.Typer(
    name="coadapt",
    cls=CommandGroup,
    help="Co-adaptive scheduling of batch size and replicas on real training jobs.",
    epilog="Exit codes of all commands: 0 success; 1 a check failed or a result is incomplete; 2 bad input; "
    "3 the scheduler, the stack or an idle machine is not available; 130 interrupted by Ctrl-C. `coadapt "
    "COMMAND --help` says what they mean for a command.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
COMMANDS: tuple[Callable[..., object], ...] = (
    init,
    run,
    submit,
    jobs,
    watch,
    cancel,
    summarize,
    compare,
    export,
    experiment,
    simulate,
    sensitivity,
    fidelity,
    calibrate,
    keys,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(workload)
app.add_typer(bench)


def main() -> None:
    """The entry point: run the command line and exit. A user's mistake is one line on stderr."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="coadapt", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        print_error(error.format_message())
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            print_error(f"cannot write: {error.strerror}")
        code = 1
    except Exception as error:
        code = _user_error(error)
    sys.exit(code)


def _user_error(error: Exception) -> int:
    """Report an error that the user can fix; returns the exit code. Raises any other error again: a bug."""
    from common.config import ConfigError
    from common.lifecycle import EXIT_BAD_INPUT, UserError

    if isinstance(error, UserError):
        code = error.exit_code
    elif isinstance(error, ConfigError):
        code = EXIT_BAD_INPUT
    else:
        raise error
    print_error(str(error))
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        from common import __version__

        print(f"coadapt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
