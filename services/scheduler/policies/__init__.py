"""The policies by name: our own, and those that installed packages offer.

A package offers a policy as an entry point of the group `coadapt.policies`: its name, and a callable that
needs no arguments (a class, say) and returns a `Policy` (interface.py). Our own names cannot be taken over.

A name may be followed by numbers for the callable, `tiresias:threshold_slot_s=120` or
`pollux:power=0,avoid_interference=false`: any of its parameters that are annotated float, int or bool.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from services.scheduler.policies.ablations import make_pollux
from services.scheduler.policies.coadapt import CoadaptPolicy
from services.scheduler.policies.dynamic import DynamicPolicy
from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.interface import Policy
from services.scheduler.policies.optimus import OptimusPolicy
from services.scheduler.policies.srtf import SrtfPolicy
from services.scheduler.policies.throughput import ThroughputPolicy
from services.scheduler.policies.tiresias import TiresiasPolicy

ENTRY_POINT_GROUP = "coadapt.policies"
OWN: dict[str, Callable[[], Policy]] = {
    "fixed": FixedPolicy,
    "dynamic": DynamicPolicy,
    "throughput": ThroughputPolicy,
    "pollux": make_pollux,
    "coadapt": CoadaptPolicy,
    "tiresias": TiresiasPolicy,
    "srtf": SrtfPolicy,
    "optimus": OptimusPolicy,
}
PARAMETER_KINDS = {
    bool: "bool, true or false",
    int: "int, a whole number",
    float: "float, a number of at most 1.8e308",
}
"""What is allowed, in words."""


class UnknownPolicy(Exception):
    """No such policy can be had; the text says which there are, or what is wrong with it."""


def policy_names() -> list[str]:
    return [*OWN, *sorted(set(_offered()) - set(OWN))]


def make_policy(text: str) -> Policy:
    """The policy `NAME` or `NAME:KEY=NUMBER,KEY=NUMBER`. Raises UnknownPolicy."""
    name, colon, given = text.partition(":")
    own = OWN.get(name)
    offered = None if own else _offered().get(name)
    if own is None and offered is None:
        raise UnknownPolicy(f"policy {name!r}: not one of {', '.join(policy_names())}")
    where = offered.value if offered else name
    try:
        make = own or offered.load()  # type: ignore[union-attr]
        parameters = _parameters(make, given) if colon else {}
        policy = make(**parameters)
    except UnknownPolicy as error:
        raise UnknownPolicy(f"policy {text!r}: {error}") from error
    except Exception as error:
        problem = str(error) if own else f"{where} cannot be used: {error!r}"
        raise UnknownPolicy(f"policy {text!r}: {problem}") from error
    if not isinstance(policy, Policy):
        needed = f"a subclass of {Policy.__module__}.Policy"
        raise UnknownPolicy(f"policy {name!r}: {where} gives a {type(policy).__name__}; needed: {needed}")
    if not isinstance(vars(policy).get("name", getattr(type(policy), "name", None)), str):
        raise UnknownPolicy(f"policy {name!r}: {where} has no `name` that is a string")
    return policy


def make_live_policy(text: str) -> Policy:
    """A policy for real jobs. Raises UnknownPolicy, also for one that only a simulator can serve."""
    policy = make_policy(text)
    if policy.needs_oracle:
        raise UnknownPolicy(
            f"policy {text!r}: goes by the true step times and remaining work of all jobs, which only a "
            "simulator knows; it runs in `coadapt simulate`"
        )
    return policy


def _parameters(make: Callable[..., Any], given: str) -> dict[str, Any]:
    """The values of "KEY=NUMBER,KEY=NUMBER" as `make` takes them."""
    kinds = {
        key: parameter.annotation
        for key, parameter in inspect.signature(make, eval_str=True).parameters.items()
        if parameter.annotation in tuple(PARAMETER_KINDS)
    }
    parameters: dict[str, Any] = {}
    for part in given.split(","):
        key, _, value = part.partition("=")
        if key not in kinds:
            raise UnknownPolicy(f"{key!r}: no such parameter; allowed: {', '.join(kinds) or 'none'}")
        if key in parameters:
            raise UnknownPolicy(f"{key}: given twice")
        try:
            parameters[key] = msgspec.convert(value, kinds[key], strict=False)
        except msgspec.ValidationError as error:
            raise UnknownPolicy(f"{key} {value!r}: allowed: {PARAMETER_KINDS[kinds[key]]}") from error
    return parameters


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
