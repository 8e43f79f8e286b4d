"""Finds a policy by name: built in, or offered by an installed package.

A package offers a policy as an entry point of the group `coadapt.policies`: a name, and a callable without
required arguments (a class, for example) that returns a `Policy` (interface.py). The names of built-in
policies cannot be replaced.

Parameters of the callable may follow the name, as in `tiresias:threshold_slot_s=120` or
`pollux:power=0,avoid_interference=false`. Allowed are all parameters annotated float, int or bool.
"""

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from services.scheduler.policies.batch_only import BatchOnlyPolicy
from services.scheduler.policies.coadapt import CoadaptPolicy
from services.scheduler.policies.dynamic import DynamicPolicy
from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.interface import Policy
from services.scheduler.policies.optimus import OptimusPolicy
from services.scheduler.policies.pollux import GoodputPolicy
from services.scheduler.policies.srtf import SrtfPolicy
from services.scheduler.policies.throughput import ThroughputPolicy
from services.scheduler.policies.tiresias import TiresiasPolicy

ENTRY_POINT_GROUP = "coadapt.policies"
PARAMETER_KINDS = {
    bool: "bool, true or false",
    int: "int, a whole number",
    float: "float, a number of at most 1.8e308",
}
"""Types of parameters, and how errors describe the allowed values."""


class UnknownPolicy(Exception):
    """The policy does not exist or cannot be made. The text names the existing ones, or the problem."""


def make_pollux(
    power: float = -1.0,
    avoid_interference: bool = True,
    by_goodput: bool = True,
    adapt_replicas: bool = True,
    adapt_batch: bool = True,
) -> Policy:
    """pollux, or pollux without a part: `adapt_batch` or `adapt_replicas` false leaves the requested value.

    Raises ValueError where no part of pollux is left, and as GoodputPolicy does.
    """
    pollux = GoodputPolicy(
        "pollux" if adapt_batch else "pollux-replicas-only",
        power=power,
        avoid_interference=avoid_interference,
        by_goodput=by_goodput,
        adapt_batch=adapt_batch,
    )
    if adapt_replicas:
        return pollux
    if not pollux.adapts_batch:
        raise ValueError("adapt_replicas false: needs adapt_batch and by_goodput; without them it is `fixed`")
    return BatchOnlyPolicy()


BUILT_IN: dict[str, Callable[[], Policy]] = {
    "fixed": FixedPolicy,
    "dynamic": DynamicPolicy,
    "throughput": ThroughputPolicy,
    "pollux": make_pollux,
    "coadapt": CoadaptPolicy,
    "tiresias": TiresiasPolicy,
    "srtf": SrtfPolicy,
    "optimus": OptimusPolicy,
}


def policy_names() -> list[str]:
    return [*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN))]


def make_policy(text: str) -> Policy:
    """The policy `NAME` or `NAME:KEY=NUMBER,KEY=NUMBER`. Raises UnknownPolicy."""
    name, colon, parameters_text = text.partition(":")
    built_in = BUILT_IN.get(name)
    entry_point = None if built_in else _entry_points().get(name)
    if built_in is None and entry_point is None:
        raise UnknownPolicy(f"policy {name!r}: not one of {', '.join(policy_names())}")
    where = entry_point.value if entry_point else name
    try:
        make = built_in or entry_point.load()  # type: ignore[union-attr]
        policy = make(**(_parameters(make, parameters_text) if colon else {}))
    except UnknownPolicy as error:
        raise UnknownPolicy(f"policy {text!r}: {error}") from error
    except Exception as error:
        problem = str(error) if built_in else f"{where} cannot be used: {error!r}"
        raise UnknownPolicy(f"policy {text!r}: {problem}") from error
    if not isinstance(policy, Policy):
        needed = f"a subclass of {Policy.__module__}.Policy"
        raise UnknownPolicy(f"policy {name!r}: {where} returns a {type(policy).__name__}; needed: {needed}")
    if not isinstance(getattr(policy, "name", None), str):
        raise UnknownPolicy(f"policy {name!r}: {where} has no `name` that is a string")
    return policy


def make_live_policy(text: str) -> Policy:
    """A policy for real jobs. Raises UnknownPolicy, also for a policy that only a simulator can run."""
    policy = make_policy(text)
    if policy.needs_oracle:
        raise UnknownPolicy(
            f"policy {text!r}: needs the true step times and remaining work of all jobs, which only a "
            "simulator knows; run it with `coadapt simulate`"
        )
    return policy


def _parameters(make: Callable[..., Any], text: str) -> dict[str, Any]:
    """The values of "KEY=NUMBER,KEY=NUMBER", with the types that `make` declares."""
    kinds = {
        key: parameter.annotation
        for key, parameter in inspect.signature(make, eval_str=True).parameters.items()
        if parameter.annotation in tuple(PARAMETER_KINDS)
    }
    parameters: dict[str, Any] = {}
    for part in text.split(","):
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


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
