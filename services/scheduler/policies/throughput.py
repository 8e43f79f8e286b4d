"""throughput: the search of `pollux` with statistical efficiency assumed to be 1.

This ablation is the test of the paper's main claim. It maximises examples per second, so it chooses the
largest batch that raises throughput, however little that batch helps training.
"""

from services.scheduler.policies.pollux import GoodputPolicy


class ThroughputPolicy(GoodputPolicy):
    def __init__(self) -> None:
        super().__init__("throughput", by_goodput=False)
