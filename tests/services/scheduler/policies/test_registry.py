"""Policies by name, with parameters, and from installed packages."""

import importlib.metadata
from typing import Any

import pytest

from services.scheduler.policies.fixed import FixedPolicy
from services.scheduler.policies.interface import ClusterView, Decision, Policy
from services.scheduler.policies.optimus import OptimusPolicy
from services.scheduler.policies.registry import (
    BUILT_IN,
    UnknownPolicy,
    make_live_policy,
    make_policy,
    policy_names,
)
from services.scheduler.policies.tiresias import TiresiasPolicy
from tests.fixtures.policy_views import job, view


def test_built_in_policies_are_found_by_name() -> None:
    assert [make_policy(name).name for name in BUILT_IN] == list(BUILT_IN)
    assert policy_names()[: len(BUILT_IN)] == list(BUILT_IN)


def test_the_error_for_an_unknown_policy_lists_the_existing_ones() -> None:
    with pytest.raises(UnknownPolicy, match=r"'best': not one of fixed, dynamic, throughput, pollux"):
        make_policy("best")


def test_a_policy_that_needs_an_oracle_is_refused_for_real_jobs() -> None:
    assert make_policy("optimus").name == "optimus"
    with pytest.raises(UnknownPolicy, match=r"needs the true step times .* only a simulator knows"):
        make_live_policy("optimus")
    assert make_live_policy("srtf").name == "srtf"
    with pytest.raises(ValueError, match="needs the oracle of a simulator"):
        OptimusPolicy().decide(view(job("a")), None, seed=0)


def test_values_after_a_name_are_parameters_of_the_policy() -> None:
    tiresias = make_policy("tiresias:threshold_slot_s=120")
    assert isinstance(tiresias, TiresiasPolicy)
    assert tiresias.name == "tiresias"
    assert tiresias.threshold_slot_s == 120.0
    pollux = make_policy("pollux:power=0,avoid_interference=false")
    assert (pollux.power, pollux.avoid_interference) == (0.0, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tiresias:threshold=1", "'threshold': no such parameter; allowed: threshold_slot_s"),
        ("tiresias:threshold_slot_s=soon", "threshold_slot_s 'soon': allowed: float"),
        ("tiresias:threshold_slot_s=-1", "threshold_slot_s -1.0: allowed: finite slot-seconds above 0"),
        ("tiresias:threshold_slot_s=nan", "threshold_slot_s nan: allowed: finite slot-seconds above 0"),
        ("coadapt:delta=inf", "delta inf: allowed: -1 to 1"),
        ("pollux:power=-5", "power -5.0: allowed: 0, and 0.01 to 4 of either sign"),
        ("pollux:power=1e-9", "power 1e-09: allowed: 0, and 0.01 to 4 of either sign"),
        ("pollux:power=1e400", "power '1e400': allowed: float, a number of at most 1.8e308"),
        ("pollux:adapt_batch=2", "adapt_batch '2': allowed: bool, true or false"),
        ("pollux:power=0,power=1", "power: given twice"),
        ("fixed:speed=2", "'speed': no such parameter; allowed: none"),
        (
            "pollux:name=3",
            "'name': no such parameter; allowed: power, avoid_interference, by_goodput, adapt_",
        ),
    ],
)
def test_an_unknown_parameter_or_a_value_that_is_not_allowed_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UnknownPolicy) as raised:
        make_policy(text)
    assert str(raised.value).startswith(f"policy {text!r}: {complaint}")


class PackagedPolicy(FixedPolicy):
    name = "mine"

    def __init__(self, slots: int = 1) -> None:
        pass


class NamelessPolicy(Policy):
    def decide(self, view: ClusterView, memory: Any, seed: int) -> Decision:
        raise NotImplementedError


class NumberedPolicy(NamelessPolicy):
    name = 7


def test_a_package_can_offer_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    here = PackagedPolicy.__module__
    offered = [
        importlib.metadata.EntryPoint(name, value, "coadapt.policies")
        for name, value in (
            ("mine", f"{here}:PackagedPolicy"),
            ("gone", f"{here}:NoSuchThing"),
            ("nameless", f"{here}:NamelessPolicy"),
            ("number", "builtins:int"),
            ("numbered", f"{here}:NumberedPolicy"),
            ("fixed", f"{here}:PackagedPolicy"),
        )
    ]
    monkeypatch.setattr("services.scheduler.policies.registry.entry_points", lambda group: offered)
    assert make_policy("mine").name == "mine"
    assert make_policy("fixed").name == "fixed"
    assert policy_names()[-5:] == ["gone", "mine", "nameless", "number", "numbered"]
    with pytest.raises(UnknownPolicy, match="NoSuchThing cannot be used"):
        make_policy("gone")
    with pytest.raises(UnknownPolicy, match="returns a int; needed: a subclass of"):
        make_policy("number")
    with pytest.raises(UnknownPolicy, match="NamelessPolicy has no `name` that is a string"):
        make_policy("nameless")
    with pytest.raises(UnknownPolicy, match="NumberedPolicy has no `name` that is a string"):
        make_policy("numbered")
    with pytest.raises(UnknownPolicy, match=r"slots '1\.5': allowed: int, a whole number"):
        make_policy("mine:slots=1.5")
