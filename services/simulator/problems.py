"""What went wrong in a simulated run, in sentences for people."""

from services.simulator.results import Result


def problems(result: Result) -> list[str]:
    """One line for each job that failed or was refused, and one each when the policy gave no valid decision,
    the run was given up, or no job could run."""
    jobs = (("failed", result.failed), ("refused", result.refused))
    lines = [f"{job_id} {what}: {reason}" for what, of in jobs for job_id, reason in of.items()]
    return lines + [problem for problem in (result.undecided, result.stalled, result.idle) if problem]
