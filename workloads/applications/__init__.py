"""The applications that jobs can use: our own four, and those in the user's modules.

Listing them does not import torch; `build_task` does.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from common.lifecycle import UserError
from common.types import ApplicationSpec
from workloads.applications.interface import Build, Task
from workloads.applications.working_directory import working_directory_modules

OWN_MODULES = (
    "workloads.applications.digits_cnn",
    "workloads.applications.mnist1d_conv",
    "workloads.applications.char_lm",
    "workloads.applications.matfac",
)


class UnknownApplication(UserError, ValueError):
    """There is no such application, or a module cannot be used as one. The text says what is allowed."""


class UnknownSetting(ValueError):
    """The application has no setting of this name. The text lists its settings."""


def applications(modules: Sequence[str] = ()) -> dict[str, ApplicationSpec]:
    """The specifications of our own applications and those in `modules`, by name. Raises UnknownApplication
    for a module that cannot be used."""
    return {name: module.SPEC for name, module in _load(modules).items()}


def build_task(
    name: str, seed: int, settings: dict[str, float] | None = None, modules: Sequence[str] = ()
) -> Task:
    """Build the objects of one job; the same arguments always give the same objects. Imports torch.

    Seeds torch's default generator. Raises UnknownApplication, UnknownSetting, and whatever the application
    itself raises.
    """
    known = _load(modules)
    if name not in known:
        raise UnknownApplication(f"application {name!r}: no such application; allowed: {', '.join(known)}")
    settings, allowed = settings or {}, known[name].SPEC.settings
    for key in settings:
        if key not in allowed:
            raise UnknownSetting(
                f"settings: {key!r}: no such setting of {name}; allowed: {', '.join(allowed) or 'none'}"
            )
    build: Build = known[name].build
    with working_directory_modules():  # a module may import others when it builds
        return build(seed, settings)


def _load(modules: Sequence[str]) -> dict[str, ModuleType]:
    known: dict[str, ModuleType] = {}
    for path in (*OWN_MODULES, *modules):
        try:
            with working_directory_modules():
                module = import_module(path)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise UnknownApplication(
                f"application module {path!r}: cannot be imported: {type(error).__name__}: {error}"
            ) from error
        spec = getattr(module, "SPEC", None)
        if not isinstance(spec, ApplicationSpec) or not callable(getattr(module, "build", None)):
            raise UnknownApplication(
                f"application module {path!r}: needs SPEC (an ApplicationSpec) and build(seed, settings)"
            )
        if known.setdefault(spec.name, module) is not module:
            raise UnknownApplication(
                f"application module {path!r}: the name {spec.name!r} is taken by {known[spec.name].__name__}"
            )
    return known
