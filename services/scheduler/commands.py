"""What the core asks its surroundings to do. The service does it for real, the simulator in virtual time."""

from dataclasses import dataclass

from common.protocol import Event, Reply


@dataclass(frozen=True)
class Answer:
    """Reply to the request that was the input."""

    reply: Reply


@dataclass(frozen=True)
class Emit:
    """Write an event to the log."""

    event: Event


@dataclass(frozen=True)
class SendOrders:
    """The orders have changed: publish them."""


@dataclass(frozen=True)
class WantRound:
    """Something happened that should not wait for the next interval."""

    trigger: str


Command = Answer | Emit | SendOrders | WantRound
