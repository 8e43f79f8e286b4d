"""The rules that every decision has to follow. Policies are checked because users may write their own."""

import math
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from services.scheduler.policies.interface import ClusterView, Decision

Decide = Callable[[ClusterView, Any, int], Decision]
LOGGED = {
    name: msgspec.msgpack.Decoder(hint) for name, hint in get_type_hints(Decision).items() if name != "memory"
}
"""The fields of a decision that go into the event log."""


class InvalidDecision(Exception):
    """The policy failed, or its decision breaks a rule; the text says how."""


def unchanged_because(policy_name: str) -> str:
    """How all reasons of a round begin in which the policy gave no valid decision. The text of
    InvalidDecision follows."""
    return f"unchanged: policy {policy_name!r} gave no valid decision: "


def validated_decision(decide: Decide, view: ClusterView, memory: Any, seed: int) -> Decision:
    """What a policy's `decide` returns, checked, with the plain types that a log can hold.

    Raises InvalidDecision."""
    try:
        decision = _plain(decide(view, memory, seed))
        problem = check_decision(view, decision)
    except InvalidDecision:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error} ({_location(error)})"
    if problem:
        raise InvalidDecision(problem.encode("utf-8", "backslashreplace").decode())
    return decision


def _location(error: BaseException) -> str:
    """File and line that raised the error."""
    at = error.__traceback__
    assert at is not None
    while at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}, line {at.tb_lineno}"


def _plain(decision: object) -> Decision:
    """The decision as a reader of the log will see it: Python itself does not check a user's types."""
    if not isinstance(decision, Decision):
        raise InvalidDecision(f"it is of type {type(decision).__name__}; needed: Decision")
    fields = {}
    for name, decoder in LOGGED.items():
        try:
            fields[name] = decoder.decode(msgspec.msgpack.encode(getattr(decision, name)))
        except Exception as error:
            raise InvalidDecision(f"{name}: {error}") from error
    return Decision(**fields, memory=decision.memory)


def check_decision(view: ClusterView, decision: Decision) -> str:
    """The first rule that `decision` breaks, in words; "" if it breaks none.

    The rules: one allocation and one reason for each job of the view and for no other; only known nodes, each
    named at most once per job; on each node at most as many replicas as slots; for each job with slots a
    config within its bounds; finite numbers.
    """
    for name, number in (("value", decision.value), ("bound", decision.bound)):
        if number is not None and not math.isfinite(number):
            return f"{name} is {number}; allowed: a finite number or None"
    wanted = {job.spec.id for job in view.jobs}
    for name, given in (("allocations", decision.allocations), ("reasons", decision.reasons)):
        if set(given) != wanted:
            return f"{name} must have one entry per job; wrong for {sorted(set(given) ^ wanted)[:3]}"
    free = {node.name: node.slots for node in view.nodes}
    for job in view.jobs:
        allocation = decision.allocations[job.spec.id]
        nodes = [placement.node for placement in allocation]
        if len(set(nodes)) < len(nodes):
            return f"job {job.spec.id} is placed on the same node twice"
        for placement in allocation:
            if placement.node not in free:
                return f"job {job.spec.id} is placed on {placement.node!r}, which does not exist"
            if placement.replicas < 1:
                return (
                    f"job {job.spec.id} has {placement.replicas} replicas on {placement.node}; "
                    "allowed: at least 1"
                )
            free[placement.node] -= placement.replicas
        replicas = sum(placement.replicas for placement in allocation)
        if replicas > job.spec.max_replicas:
            return f"job {job.spec.id} has {replicas} replicas; allowed: at most {job.spec.max_replicas}"
        if not replicas:
            continue
        config = decision.configs.get(job.spec.id)
        if config is None:
            return f"job {job.spec.id} has slots but no config"
        total = config.total_batch(replicas)
        if config.accumulation < 0 or not 1 <= config.atomic_batch <= job.spec.max_atomic_batch:
            return (
                f"job {job.spec.id} has {config.accumulation + 1} passes of {config.atomic_batch} examples; "
                f"allowed: at least 1 pass of 1 to {job.spec.max_atomic_batch}"
            )
        if not job.spec.min_batch_size <= total <= job.spec.max_batch_size:
            return (
                f"job {job.spec.id} has total batch {total}; "
                f"allowed: {job.spec.min_batch_size} to {job.spec.max_batch_size}"
            )
    overfull = [name for name, slots in free.items() if slots < 0]
    return f"node {overfull[0]} has {-free[overfull[0]]} more replicas than slots" if overfull else ""
