"""throughput: the search of `pollux` with statistical efficiency taken for 1.

This is the ablation on which the paper's claim rests: it maximises examples a second, so it takes the
largest batch that pays in throughput, whatever that batch is worth to training.
"""

from services.scheduler.policies.pollux import GoodputPolicy


class ThroughputPolicy(GoodputPolicy):
    def __init__(self) -> None:
        super().__init__("throughput", by_goodput=False)
