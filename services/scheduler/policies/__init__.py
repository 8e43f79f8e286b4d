"""The scheduling policies: one file per policy, found by name in `registry.py`."""
