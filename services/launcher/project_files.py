"""The files of a project folder, as `coadapt init` writes them: coadapt.toml, Procfile and workload.toml.

coadapt.toml is generated from the structs of `common.config`, so each key, its default and its meaning are
written in one place. The Procfile and the first workload have their text here.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from common.config import CONFIG_FILE, SHORT_NAMES, Config
from common.lifecycle import UserError

PROCFILE = "Procfile"
WORKLOAD_FILE = "workload.toml"
LINE_CHARS = 100
PROCFILE_TEXT = """\
# The processes of one stack, for `honcho start`. To add a node, add a line for its agent with a new name
# after --node.
scheduler: exec env OMP_NUM_THREADS=1 python -m services.scheduler
metrics-collector: exec env OMP_NUM_THREADS=1 python -m services.metrics_collector
event-logger: exec env OMP_NUM_THREADS=1 python -m services.event_logger
agent-1: exec env OMP_NUM_THREADS=1 python -m services.job_agent --node node-1
agent-2: exec env OMP_NUM_THREADS=1 python -m services.job_agent --node node-2
"""
WORKLOAD_TEXT = """\
# Two short jobs. `coadapt run workload.toml` runs them on a stack of their own; `coadapt submit
# workload.toml` submits them to a running stack. A key that a job leaves out has its application's default.
name = "first-jobs"
seed = 1

[[job]]
application = "digits-cnn"
at_s = 0.0          # seconds after the start of the workload
target = 0.8        # the job ends when its metric on held-out data reaches this
replicas = 1        # how many replicas the user asks for; adaptive policies choose their own number

[[job]]
application = "mnist1d-conv"
at_s = 1.0
target = 0.4
replicas = 2
batch_size = 32     # total batch size that the user asks for; adaptive policies choose their own
"""


def config_text() -> str:
    """coadapt.toml with every section and key of `Config`: docstrings as comments, defaults as values."""
    lines = [
        *_comment("Settings of coadapt. Every key has its default value here and may be left out."),
        *_comment("Names that end in _s are seconds, in _bytes bytes."),
        *_comment(
            "An environment variable COADAPT_<SECTION>_<KEY> overrides a key. "
            f"Short names: {', '.join(SHORT_NAMES)}. COADAPT_CONFIG names another file to read."
        ),
    ]
    for section in msgspec.structs.fields(Config):
        lines += ["", *_comment(section.type.__doc__ or ""), f"[{section.name}]"]
        docstrings = field_docstrings(section.type)
        for key, value in msgspec.to_builtins(section.default).items():
            lines += ["", *_comment(docstrings.get(key, "")), f"{key} = {_toml_value(value)}"]
    return "\n".join(lines) + "\n"


def field_docstrings(struct: type) -> dict[str, str]:
    """The text below each field of a class, as one line: Python itself keeps no docstrings of fields."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in pairwise(definition.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def create_project(folder: Path) -> list[Path]:
    """Write the three files into `folder`, which is created if it does not exist; returns their paths.

    Raises UserError, and leaves the folder as it was, if one of the files exists or cannot be written."""
    texts = {CONFIG_FILE: config_text(), PROCFILE: PROCFILE_TEXT, WORKLOAD_FILE: WORKLOAD_TEXT}
    files = {folder / name: text for name, text in texts.items()}
    created: list[Path] = []
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; name a folder, which is created if it does not exist")
        folder.mkdir(parents=True, exist_ok=True)
        if existing := [file.name for file in files if file.exists() or file.is_symlink()]:
            raise UserError(
                f"{folder}: already has {', '.join(existing)}; nothing was written: choose another folder, "
                "or move these files away"
            )
        for file, text in files.items():
            with file.open("x", encoding="utf-8") as stream:
                created.append(file)
                stream.write(text)
    except BaseException as error:
        for file in created:
            file.unlink()
        if isinstance(error, OSError):
            # an error of a write has no file name: it is in the last file that was created
            name = error.filename or created[-1]
            raise UserError(f"{name}: cannot be written: {error.strerror}") from error
        raise
    return created


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(" ".join(text.split()), LINE_CHARS, initial_indent="# ", subsequent_indent="# ")


def _toml_value(value: object) -> str:
    """Strings, numbers, booleans and lists of strings are written the same way in TOML and JSON."""
    return f"{value:_}" if type(value) is int else json.dumps(value, ensure_ascii=False)
