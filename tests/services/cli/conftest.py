"""Shared by the tests of commands."""

from collections.abc import Callable

import pytest

from tests.conftest import Outcome


@pytest.fixture
def the_error() -> Callable[[Outcome], str]:
    """The single printable line on stderr of a command that printed nothing else."""

    def line_of(result: Outcome) -> str:
        assert result.out == ""
        (line,) = result.err.splitlines()
        assert line.startswith("coadapt: ")
        assert line.isprintable()
        return line

    return line_of


@pytest.fixture
def refused(coadapt: Callable[..., Outcome], the_error: Callable[[Outcome], str]) -> Callable[..., str]:
    """Run a command that must be refused as bad input; returns its error line."""

    def run(*arguments: object) -> str:
        result = coadapt(*arguments)
        assert result.code == 2
        return the_error(result)

    return run
