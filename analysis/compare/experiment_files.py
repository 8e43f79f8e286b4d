"""The folder that `coadapt experiment` writes: the names of its files, and the record of a run.

DIR/experiment.json               definition, settings, machine, versions, date
DIR/<set>-<policy>-<seed>/        a run: its log and workload.toml; done once run.json is there too
DIR/isolated/isolated-<application>-<n>/   the same for a run of one job alone
DIR/lost/<run>-<attempt>/         runs that were noisy, failed or interrupted, and were set aside
"""

import msgspec

RUN_FILE, EXPERIMENT_FILE, WORKLOAD_FILE = "run.json", "experiment.json", "workload.toml"
LOST, ISOLATED = "lost", "isolated"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`. A value is null if it is unknown, because the run was interrupted or its stack did not come
    up."""

    set: str
    requests: str = ""
    policy: str
    seed: int
    attempt: int = 1
    started: str | None = None
    """ISO 8601, with the time zone."""
    wall_s: float | None = None
    """The whole run, including the start and stop of the stack."""
    load_before: float | None = None
    load_mean: float | None = None
    """Load average of the system."""
    steal_fraction: float | None = None
    """Share of the machine's CPU that the hypervisor took."""
    foreign_cpu_fraction: float | None = None
    """Share of the machine's CPU that other processes used."""
    peak_memory_bytes: int | None = None
    """All processes of the stack together."""
    verified: bool = True
    """Whether every job of the workload was completed and verified."""
    audit_clean: bool = True
    noisy: bool = False
    reason: str = ""
    """Everything that is wrong with the run; empty: nothing."""

    @property
    def clean(self) -> bool:
        return not self.reason

    @property
    def fault(self) -> str:
        """Why the run does not count; empty if it counts."""
        faults = {
            "noisy": self.noisy,
            "not verified": not self.verified,
            "audit not clean": not self.audit_clean,
        }
        named = ", ".join(name for name, applies in faults.items() if applies and name not in self.reason)
        return ": ".join(text for text in (named, self.reason) if text)

    @property
    def full_set(self) -> str:
        """The set with its kind of requests: the same jobs with other requests are another set."""
        if self.requests and self.requests not in self.set.split("-"):
            return f"{self.set}-{self.requests}"
        return self.set
