"""What the core asks for. The service carries it out in real time, the simulator in virtual time."""

from dataclasses import dataclass

from common.protocol import Event, Reply


@dataclass(frozen=True)
class Answer:
    """Send this reply to the request that was the input."""

    reply: Reply


@dataclass(frozen=True)
class Emit:
    """Write an event to the log."""

    event: Event


@dataclass(frozen=True)
class SendOrders:
    """Publish the orders, which have changed."""


@dataclass(frozen=True)
class WantRound:
    """Start a round now: something happened that should not wait for the next interval."""

    trigger: str


Command = Answer | Emit | SendOrders | WantRound
