"""throughput: pollux with an efficiency of 1."""

from tests.fixtures.known_models import CLEAN
from tests.fixtures.policy_views import counts, decide, job, nodes, profile, view


def test_the_batch_is_larger_than_is_good_for_training() -> None:
    clean = view(job("a", profile=profile(statistics=CLEAN)), on=nodes(4))
    by_goodput, by_throughput = decide("pollux", clean), decide("throughput", clean)
    total = {
        name: d.configs["a"].total_batch(counts(d)["a"])
        for name, d in (("goodput", by_goodput), ("throughput", by_throughput))
    }
    assert total["throughput"] == 512
    assert total["goodput"] < 100
    assert "modelled throughput" in by_throughput.reasons["a"]


def test_no_gradient_statistics_are_needed() -> None:
    decision = decide("throughput", view(job("a", profile=profile(statistics=None)), on=nodes(4)))
    assert decision.configs["a"].total_batch(counts(decision)["a"]) == 512
