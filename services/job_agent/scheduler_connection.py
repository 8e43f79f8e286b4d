"""An agent's connection to the scheduler: it registers, sends heartbeats, receives orders and reports facts.

The agent keeps trying to register until a scheduler answers, and logs that once. Reports are numbered within
an incarnation and repeated until they are acknowledged. If the scheduler is silent, nothing changes. If it
does not know the agent, or starts another run, the connection is lost, and the agent may join again.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable

from common.config import Config
from common.lifecycle import get_logger
from common.messaging.curve_keys import load_keys
from common.messaging.publish_subscribe import OrdersSubscriber
from common.messaging.reactor import Reactor
from common.messaging.request_reply import RequestClient
from common.protocol import (
    Done,
    Fact,
    Heartbeat,
    LeaveAgent,
    Orders,
    Refused,
    RegisterAgent,
    Registered,
    Reply,
    Report,
)
from common.types import Node

ANSWER_S = 1.0
"""A request is repeated after this time without a reply."""
FACTS_AT_ONCE = 100

log = get_logger()


class SchedulerConnection:
    """Callbacks: `on_joined(registered)`; `on_orders(orders)` for each newer version of the orders of the
    run; `on_lost(why)`, after which the agent belongs to no run until `join` is called again."""

    def __init__(
        self,
        config: Config,
        reactor: Reactor,
        on_joined: Callable[[Registered], None],
        on_orders: Callable[[Orders], None],
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reactor = reactor
        self._on_joined = on_joined
        self._on_orders = on_orders
        self._on_lost = on_lost
        self._clock = clock
        self._silence_s = config.scheduler.agent_timeout_s
        keys = load_keys(config.endpoints.keys_dir)
        self._client = RequestClient(config.endpoints.scheduler_requests, keys, reactor, config.limits)
        self._subscriber = OrdersSubscriber(
            reactor, config.endpoints.scheduler_orders, self._on_published, keys=keys, limits=config.limits
        )
        reactor.every(config.scheduler.heartbeat_s, self._on_heartbeat_due)
        self.node: Node | None = None
        self.incarnation = ""
        self.joined = False
        self.run_id = ""
        self.orders_version = 0
        self._facts: deque[Fact] = deque()
        self._report: Report | None = None
        self._reports = 0
        self._heard_s = 0.0
        self._heartbeat_under_way = False
        self._logged: set[str] = set()

    # ------------------------------------------------------------------ joining and leaving

    def join(self, node: Node) -> None:
        """Register `node` as a new incarnation. Repeats this until a scheduler accepts it."""
        self.node = node
        self.incarnation = uuid.uuid4().hex[:8]
        self._register()

    def leave(self, timeout_s: float) -> None:
        """Report the last facts and leave, if the scheduler answers within `timeout_s`."""
        if not self.joined or self.node is None:
            return
        end_s = self._clock() + timeout_s
        self._reactor.run_until(lambda: not self._facts or not self.joined, timeout_s / 2)
        self.joined = False
        answered: list[bool] = []
        self._client.post(
            LeaveAgent(node=self.node.name, incarnation=self.incarnation),
            lambda _reply: answered.append(True),
            lambda: answered.append(False),
            timeout_s=timeout_s,
            attempts=1,
        )
        self._reactor.run_until(lambda: bool(answered), end_s - self._clock())

    def resign(self) -> None:
        """Leave without waiting for the reply, so that the scheduler accepts the next incarnation at once."""
        if self.joined and self.node is not None:
            leave = LeaveAgent(node=self.node.name, incarnation=self.incarnation)
            self._client.post(leave, lambda _reply: None, lambda: None, timeout_s=ANSWER_S)
        self.end()

    def end(self) -> None:
        """Belong to no run. A report under way is dropped; its facts are kept in case the agent joins the
        same run again."""
        self.joined = False
        self.incarnation = ""
        self._report = None

    def close(self) -> None:
        self._client.close()
        self._subscriber.close()

    def _register(self) -> None:
        incarnation = self.incarnation
        if incarnation and not self.joined and self.node is not None:
            self._client.post(
                RegisterAgent(node=self.node, incarnation=incarnation),
                lambda reply: self._on_registration(incarnation, reply),
                lambda: self._on_no_scheduler(incarnation),
                timeout_s=ANSWER_S,
                attempts=1,
            )

    def _on_no_scheduler(self, incarnation: str) -> None:
        if incarnation == self.incarnation:
            self._log_once(f"waiting for a scheduler at {self._client.endpoint}")
            self._register()

    def _on_registration(self, incarnation: str, reply: Reply) -> None:
        if incarnation != self.incarnation:
            return
        if not isinstance(reply, Registered):
            reason = _problem(reply)
            self._log_once(f"the scheduler does not accept this agent: {reason}")
            self._reactor.call_later(ANSWER_S, self._register)
            return
        if reply.run.run_id != self.run_id:
            self._facts.clear()
        self.run_id = reply.run.run_id
        self.orders_version = reply.orders.version
        self._reports = 0
        self._heard()
        self._on_joined(reply)
        self.joined = True
        self._next_report()

    def _lose(self, why: str) -> None:
        self.end()
        self._on_lost(why)

    # ------------------------------------------------------------------ heartbeats and orders

    def _on_heartbeat_due(self) -> None:
        if self.joined and self.node is not None and not self._heartbeat_under_way:
            self._heartbeat_under_way = True
            incarnation = self.incarnation
            self._client.post(
                Heartbeat(node=self.node.name, incarnation=incarnation, orders_version=self.orders_version),
                lambda reply: self._on_heartbeat(incarnation, reply),
                self._on_silence,
                timeout_s=ANSWER_S,
                attempts=1,
            )

    def _on_heartbeat(self, incarnation: str, reply: Reply) -> None:
        self._heartbeat_under_way = False
        if not self.joined or incarnation != self.incarnation:
            return
        self._heard()
        if isinstance(reply, Orders):
            self._on_published(reply)
        elif isinstance(reply, Refused):
            self._lose(reply.reason)

    def _on_silence(self) -> None:
        self._heartbeat_under_way = False
        if self.joined and self._clock() - self._heard_s > self._silence_s:
            self._log_once(f"no scheduler answers at {self._client.endpoint}; running jobs continue")

    def _on_published(self, orders: Orders) -> None:
        """Orders that were published or came as a reply; old and repeated ones change nothing."""
        if not self.joined:
            return
        if orders.run_id != self.run_id:
            self._lose(f"run {orders.run_id} has started")
        elif orders.version > self.orders_version:
            self.orders_version = orders.version
            self._on_orders(orders)

    def _heard(self) -> None:
        self._heard_s = self._clock()
        if self._logged:
            self._logged.clear()
            log.info(f"the scheduler at {self._client.endpoint} answers")

    def _log_once(self, text: str) -> None:
        """Log a text only once until the scheduler answers."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning(text)

    # ------------------------------------------------------------------ facts

    def report(self, fact: Fact) -> None:
        self._facts.append(fact)
        if self.joined and self._report is None:
            self._next_report()

    def _next_report(self) -> None:
        self._report = None
        if self._facts and self.joined and self.node is not None:
            self._reports += 1
            self._report = Report(
                node=self.node.name,
                incarnation=self.incarnation,
                number=self._reports,
                facts=tuple(self._facts)[:FACTS_AT_ONCE],
            )
            self._post_report(self._report)

    def _post_report(self, report: Report) -> None:
        self._client.post(
            report,
            lambda reply: self._on_reported(report, reply),
            lambda: self._on_unreported(report),
            timeout_s=ANSWER_S,
        )

    def _on_reported(self, report: Report, reply: Reply) -> None:
        if report is not self._report:
            return
        if not isinstance(reply, Done):
            self._lose(_problem(reply))
            return
        for _ in report.facts:
            self._facts.popleft()
        self._next_report()

    def _on_unreported(self, report: Report) -> None:
        if report is self._report:
            self._post_report(report)


def _problem(reply: Reply) -> str:
    return reply.reason if isinstance(reply, Refused) else f"unexpected reply {type(reply).__name__}"
