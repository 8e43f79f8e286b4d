"""What every process agrees on: types, messages, transport, configuration, event log, goodput model."""

__version__ = "0.1.0"
