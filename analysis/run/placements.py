"""The placement in which each training sample was taken. Pure."""

import polars as pl

from analysis.log.history import RunHistory


def placed_samples(run: RunHistory) -> pl.DataFrame:
    """The samples of submitted jobs with `application` and `placement`: the replicas on each node of the
    group, most first. Samples of a group that the log does not describe are left out.

    A change of the batch alone has a generation of its own and keeps the group of the one before.
    """
    groups = run.frames.generations.select(
        "job_id", "generation", placement=pl.col("allocation_replicas").list.sort(descending=True)
    )
    jobs = run.frames.jobs.select("job_id", "application")
    samples = run.frames.samples.join(jobs, on="job_id", how="inner", maintain_order="left")
    placed = samples.join_asof(groups, on="generation", by="job_id", check_sortedness=False)
    return placed.filter(pl.col("placement").is_not_null())
