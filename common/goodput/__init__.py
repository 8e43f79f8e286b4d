"""Goodput of a training job: throughput x statistical efficiency (Pollux, section 3)."""
