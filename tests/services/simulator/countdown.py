"""A prompt world as small as can be: a job ends after so many seconds with slots, whatever their number."""

from collections.abc import Hashable, Sequence

from common.protocol import JobSaved, Orders, TargetReached, VerificationDone, Verified
from common.types import JobProfile, JobSpec
from services.simulator.world import Happening
from tests.services.scheduler_driver import APPLICATION


class Countdown:
    """`needed_s` seconds for each job by id; infinity: it never ends."""

    prompt = True
    oracle = None
    restart_s = 1.0

    def __init__(self, needed_s: dict[str, float]) -> None:
        self.applications = {APPLICATION.name: APPLICATION}
        self.left_s = dict(needed_s)
        self.running: dict[str, tuple[int, str]] = {}
        self.generations: dict[str, int] = {}
        self.verified: set[str] = set()
        self.now_s = 0.0

    def kind(self, spec: JobSpec) -> Hashable:
        return spec.id

    def fixed_s(self, spec: JobSpec) -> float:
        return 0.0

    def complete(self, spec: JobSpec) -> JobSpec:
        return spec

    def apply(self, orders: Orders, now_s: float) -> Sequence[Happening]:
        happened = []
        self.running = {}
        for order in orders.jobs:
            job_id, generation = order.spec.id, order.generation
            if order.allocation:
                self.running[job_id] = generation, order.allocation[0].node
            elif generation != self.generations.get(job_id):
                saved = JobSaved(job_id=job_id, generation=generation, checkpoint="", progress=0.0)
                happened.append(Happening(now_s + 0.5, order.leaving[0].node, saved))
            self.generations[job_id] = generation
        for order in orders.verifications:
            if order.spec.id not in self.verified:
                self.verified.add(order.spec.id)
                verified = Verified(
                    job_id=order.spec.id, ok=True, metric=1.0, reported_metric=1.0, epochs=1, findings=()
                )
                done = VerificationDone(job_id=order.spec.id, metric=1.0)
                happened += [Happening(now_s + 0.25, order.node, what) for what in (verified, done)]
        return happened

    def advance(self, until_s: float) -> tuple[float, Sequence[Happening]]:
        first_s = min((self.left_s[job_id] for job_id in self.running), default=float("inf"))
        self.now_s, seconds = (
            min(until_s, self.now_s + first_s),
            min(until_s - self.now_s, first_s),
        )
        happened = []
        for job_id, (generation, node) in list(self.running.items()):
            self.left_s[job_id] -= seconds
            if self.left_s[job_id] <= 0:
                del self.running[job_id]
                claim = TargetReached(
                    job_id=job_id, generation=generation, checkpoint="", metric=1.0, progress=1.0
                )
                happened.append(Happening(self.now_s, node, claim))
        return self.now_s, happened

    def profiles(self, job_ids: Sequence[str]) -> tuple[JobProfile, ...]:
        return ()
