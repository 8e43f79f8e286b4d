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
