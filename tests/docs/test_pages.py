"""What the pages name exists: other pages, files, commands, settings."""

import re
from pathlib import Path

import pytest

from common.config import (
    CONFIG_FILE,
    RESERVED_NAMES,
    Config,
    ConfigError,
    config_environment,
    load_config,
)
from services.cli.reference import root_command, subcommands
from services.scheduler.policies.registry import policy_names
from tests.fixtures.doc_pages import (
    COMING,
    PAGES,
    README,
    ROOT,
    anchors,
    inline_code,
    links,
    name_of,
    text_of,
)
from workloads.applications import applications

EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name_of)
PATH = re.compile(r"(?:common|workloads|analysis|services|docs|tests)/[\w./-]*")
SETTING = re.compile(rf"\[?({'|'.join(Config.__struct_fields__)})(?:\.|\] )(\w+)")
FILE_SUFFIXES = {"json", "log", "md", "py", "toml"}
README_LINES = 150


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= README_LINES


def test_the_readme_leads_to_every_page() -> None:
    pages = {name_of(page) for page in PAGES if page.parent == ROOT / "docs"}
    assert pages <= set(links(README))


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@EVERY_PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # which also names what was
        for code in inline_code(page):
            if PATH.fullmatch(code):
                assert (ROOT / code).exists(), code


@EVERY_PAGE
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    known = {context.command_path: command for command, context in subcommands(*root_command())}
    for code in inline_code(page):
        words = code.split()
        if words[:1] != ["coadapt"] or len(words) == 1 or words[1] in COMING:
            continue
        path = max((path for path in known if f"{code} ".startswith(f"{path} ")), key=len, default="")
        assert path or words[1].startswith("-"), code
        if path:
            options = {name for parameter in known[path].params for name in parameter.opts}
            assert {word for word in words if re.match("--?[a-z]", word)} <= options, code


@EVERY_PAGE
def test_settings_that_are_named_exist(page: Path) -> None:
    for code in inline_code(page):
        if match := SETTING.fullmatch(code):
            section, key = match.groups()
            if key not in FILE_SUFFIXES:
                assert key in getattr(Config(), section).__struct_fields__, code
        name, _, value = code.partition("=")
        if name.startswith("COADAPT_") and name not in RESERVED_NAMES and "<" not in name:
            try:
                load_config({name: value or config_environment(Config()).get(name, "1")})
            except ConfigError as error:
                pytest.fail(f"{code}: {error}")


@pytest.mark.parametrize("page", ["docs/policies.md", "docs/how-it-works.md"])
def test_every_policy_or_application_has_its_line(page: str) -> None:
    names = policy_names() if page == "docs/policies.md" else applications()
    assert set(names) <= set(inline_code(ROOT / page))


def test_the_configuration_file_of_the_repository_has_the_defaults() -> None:
    assert load_config({}, ROOT / CONFIG_FILE) == Config()


def test_pictures_are_readable_on_any_background() -> None:
    """A drawing of ours brings its own background, and says what it shows to who cannot see it."""
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert 'width="100%" height="100%"' in text, picture.name
        assert "<title>" in text, picture.name
        assert "<desc>" in text, picture.name
