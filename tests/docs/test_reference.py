"""The generated reference pages say what the code says."""

import pytest

from common.config import RESERVED_NAMES, SHORT_NAMES, Config, config_environment
from services.cli.reference import ROOT, pages, root_command, subcommands

PAGES = pages()


@pytest.mark.parametrize("path", PAGES)
def test_the_reference_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path], f"{path} is old: run `make docs`"


def test_every_command_and_option_is_on_the_page() -> None:
    text = PAGES["docs/commands.md"]
    for command, context in subcommands(*root_command()):
        section = text.split(f"\n## {context.command_path}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            assert f"`{name}" in section, f"{context.command_path} {name}"


def test_every_key_is_on_the_page_with_its_environment_names() -> None:
    names = {*config_environment(Config()), *SHORT_NAMES, *RESERVED_NAMES}
    assert names <= set(PAGES["docs/configuration.md"].split("`"))
