"""What every decision has to keep, whoever wrote the policy: a user may have."""

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


class NoDecision(Exception):
    """The policy failed, or its decision breaks a rule; the text says how."""


def no_decision(policy_name: str) -> str:
    """How it is told that a policy gave no valid decision; the text of NoDecision follows."""
    return f"policy {policy_name!r} gave no valid decision: "


def decided(decide: Decide, view: ClusterView, memory: Any, seed: int) -> Decision:
    """What a policy's `decide` answers, checked and of the plain types that a log takes, or NoDecision."""
    try:
        decision = _plain(decide(view, memory, seed))
        problem = check_decision(view, decision)
    except NoDecision:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{type(error).__name__}: {error} ({_where(error)})"
    if problem:
        raise NoDecision(problem.encode("utf-8", "backslashreplace").decode())
    return decision


def _where(error: BaseException) -> str:
    """File and line of what raised it."""
    at = error.__traceback__
    assert at is not None
    while at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}, line {at.tb_lineno}"


def _plain(decision: object) -> Decision:
    """The decision as a reader of the log will have it, since Python checks no types of a user's policy."""
    if not isinstance(decision, Decision):
        raise NoDecision(f"it is of type {type(decision).__name__}; needed: Decision")
    fields = {}
    for name, decoder in LOGGED.items():
        try:
            fields[name] = decoder.decode(msgspec.msgpack.encode(getattr(decision, name)))
        except Exception as error:
            raise NoDecision(f"{name}: {error}") from error
    return Decision(**fields, memory=decision.memory)


def check_decision(view: ClusterView, decision: Decision) -> str:
    """The first rule that `decision` breaks, in words, or "".

    One allocation and one sentence for each job of the view and for no other; known nodes, each named once a
    job; at most as many replicas on a node as it has slots; a config within the job's bounds wherever there
    are slots; finite numbers.
    """
    for name, number in (("value", decision.value), ("bound", decision.bound)):
        if number is not None and not math.isfinite(number):
            return f"{name} is {number}; a finite number or None"
    wanted = {job.spec.id for job in view.jobs}
    for name, given in (("allocations", decision.allocations), ("reasons", decision.reasons)):
        if set(given) != wanted:
            return f"{name} must name each job once; differs in {sorted(set(given) ^ wanted)[:3]}"
    free = {node.name: node.slots for node in view.nodes}
    for job in view.jobs:
        allocation = decision.allocations[job.spec.id]
        nodes = [placement.node for placement in allocation]
        if len(set(nodes)) < len(nodes):
            return f"job {job.spec.id} names a node twice"
        for placement in allocation:
            if placement.node not in free:
                return f"job {job.spec.id} is put on {placement.node!r}, which is not there"
            if placement.replicas < 1:
                return f"job {job.spec.id} has {placement.replicas} replicas on {placement.node}; at least 1"
            free[placement.node] -= placement.replicas
        replicas = sum(placement.replicas for placement in allocation)
        if replicas > job.spec.max_replicas:
            return f"job {job.spec.id} has {replicas} replicas; at most {job.spec.max_replicas}"
        if not replicas:
            continue
        config = decision.configs.get(job.spec.id)
        if config is None:
            return f"job {job.spec.id} has slots but no config"
        total = config.total_batch(replicas)
        if config.accumulation < 0 or not 1 <= config.atomic_batch <= job.spec.max_atomic_batch:
            return (
                f"job {job.spec.id} has {config.accumulation + 1} passes of {config.atomic_batch} examples; "
                f"at least 1 pass of 1 to {job.spec.max_atomic_batch}"
            )
        if not job.spec.min_batch_size <= total <= job.spec.max_batch_size:
            return (
                f"job {job.spec.id} has total batch {total}; "
                f"{job.spec.min_batch_size} to {job.spec.max_batch_size}"
            )
    over = [name for name, slots in free.items() if slots < 0]
    return f"node {over[0]} has more replicas than slots, by {-free[over[0]]}" if over else ""
