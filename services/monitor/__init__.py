"""Shows people the running jobs."""
