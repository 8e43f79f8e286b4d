"""What holds for every test: hypothesis draws the same examples in every run, however slow the machine is."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
