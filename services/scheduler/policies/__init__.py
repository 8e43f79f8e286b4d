"""The policies by name: our own, and those that installed packages offer.

A package offers a policy as an entry point of the group `coadapt.policies`: its name, and a callable without
arguments (a class, say) that returns a `Policy` (interface.py). Our own names cannot be taken over.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from services.scheduler.policies.dynamic import DynamicPolicy
from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.interface import Policy
from services.scheduler.policies.pollux import GoodputPolicy
from services.scheduler.policies.throughput import ThroughputPolicy

ENTRY_POINT_GROUP = "coadapt.policies"
OWN: dict[str, Callable[[], Policy]] = {
    "fixed": FixedPolicy,
    "dynamic": DynamicPolicy,
    "throughput": ThroughputPolicy,
    "pollux": GoodputPolicy,
}


class UnknownPolicy(Exception):
    """No policy of that name can be had; the text says which there are, or what is wrong with it."""


def policy_names() -> list[str]:
    return [*OWN, *sorted(set(_offered()) - set(OWN))]


def make_policy(name: str) -> Policy:
    """Raises UnknownPolicy."""
    if name in OWN:
        return OWN[name]()
    offered = _offered().get(name)
    if offered is None:
        raise UnknownPolicy(f"policy {name!r}: not one of {', '.join(policy_names())}")
    try:
        policy = offered.load()()
    except Exception as error:
        raise UnknownPolicy(f"policy {name!r}: {offered.value} cannot be used: {error!r}") from error
    if not callable(getattr(policy, "decide", None)):
        raise UnknownPolicy(f"policy {name!r}: {offered.value} gives no object with a method `decide`")
    return policy  # type: ignore[no-any-return]


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
