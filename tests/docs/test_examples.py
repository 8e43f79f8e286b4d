"""The examples on the pages work: files are valid, commands exist, and the quick ones are run."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import typer

from common.config import CONFIG_FILE, PREFIX, load_config
from services.cli.reference import root_command
from services.experiment.plan import read_definition
from services.scheduler.decisions import check_decision
from tests.fixtures.doc_pages import COMING, PAGES, ROOT, Block, block_with, blocks, name_of, simple_commands
from tests.fixtures.policy_views import random_view
from workloads.applications import applications
from workloads.files.workload_file import read_workload

BLOCKS = [block for page in PAGES for block in blocks(page)]
CONSOLES = [(block, line) for block in BLOCKS if block.language == "console" for line in block.commands]
WALKS = [page for page in PAGES if any(block.runs for block in blocks(page))]
OTHER_PROGRAMS = {"git", "cd", "make", "pip", "honcho", "python", "mkdir", "scp", "kill", ".", "rm"}
ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)")
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("block", "line"), CONSOLES, ids=[f"{b.page}: {line}" for b, line in CONSOLES])
def test_a_command_line_is_understood(block: Block, line: str) -> None:
    for words in simple_commands(line):
        program, *arguments = without_assignments(words)
        if program == "coadapt":
            parse(arguments)
        elif program == "make":
            assert {word for word in arguments if "=" not in word} <= MAKE_TARGETS
        elif program == "python":
            module = (
                arguments[1] if arguments[0] == "-m" else arguments[0].removesuffix(".py").replace("/", ".")
            )
            assert find_spec(module), module
        else:
            assert program in OTHER_PROGRAMS or program.startswith(".venv/"), program


def without_assignments(words: list[str]) -> list[str]:
    """The command without the variables set before it; those of coadapt must be accepted."""
    while match := ASSIGNMENT.fullmatch(words[0]):
        name, value = match.groups()
        if name.startswith(PREFIX):
            load_config({name: value})
        words = words[1:]
        if not words:
            return ["cd"]
    return words if words[0] != "export" else without_assignments(words[1:])


def parse(arguments: list[str]) -> None:
    """Read the arguments as the command would, without running it; raises what typer raises."""
    command, context = root_command()
    if arguments[0] in COMING and command.get_command(context, arguments[0]) is None:
        return
    while hasattr(command, "list_commands"):
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, f"coadapt {name}: no such command"
        command, context = found, typer.Context(found, info_name=name, parent=context)
    command.make_context(context.info_name, arguments, parent=context.parent)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: b.page)
def test_python_on_a_page_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")


def test_every_toml_block_has_a_name_that_says_its_kind() -> None:
    for block in BLOCKS:
        assert block.language != "toml" or KIND.match(block.file), f"{block.page}: {block.text}"


KIND = re.compile(r"(coadapt|workload|experiment|pyproject)[\w-]*\.toml")


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.file for b in blocks(p))], ids=name_of)
def test_the_files_of_a_page_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config({}, tmp_path / CONFIG_FILE) if (tmp_path / CONFIG_FILE).exists() else load_config({})
    for path in tmp_path.glob("*.toml"):
        kind = KIND.match(path.name)
        assert kind is not None
        if kind[1] == "workload":
            assert read_workload(path, applications(config.applications.modules)).rows
        elif kind[1] == "experiment":
            assert read_definition(path).policies
    for module in config.applications.modules:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("page", WALKS, ids=name_of)
def test_the_walk_of_a_page_works(page: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    for block in blocks(page):
        write(block, tmp_path)
        if not block.runs:
            continue
        scripts = block.commands if block.language == "console" else [block.text]
        for script in scripts:
            shell = ["bash", "-c"] if block.language == "console" else [sys.executable, "-c"]
            done = subprocess.run(
                [*shell, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50
            )
            assert done.returncode == block.exit_code, f"{script}\n{done.stdout}\n{done.stderr}"


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        write(block, folder)


def write(block: Block, folder: Path) -> None:
    if not block.file:
        return
    (folder / block.file).write_text(block.text, encoding="utf-8")
    if block.file == "pyproject.toml":
        write_installed(msgspec.toml.decode(block.text)["project"], folder)


def write_installed(project: dict, folder: Path) -> None:
    """What `pip install` leaves of a package that offers entry points."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("seed", range(20))
def test_the_policy_on_the_page_gives_valid_decisions(seed: int) -> None:
    names: dict = {}
    exec(block_with("docs/write-a-policy.md", "class SmallestFirst"), names)
    view = random_view(seed)
    assert check_decision(view, names["SmallestFirst"]().decide(view, None, 0)) == ""
