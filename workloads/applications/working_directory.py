"""Import a user's own modules from the working directory, where coadapt.toml lies.

`python -m` has the working directory on its module path; an installed command such as `coadapt` does not.
Both must find the same application modules, and the modules that those import.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class WorkingDirectoryFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only for modules without a parent package: a package itself says where its modules are."""
        return PathFinder.find_spec(fullname, [os.getcwd()]) if path is None else None


@contextmanager
def working_directory_modules() -> Iterator[None]:
    """In the block, modules that are found nowhere else are imported from the working directory."""
    finder = WorkingDirectoryFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
