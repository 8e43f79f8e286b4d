"""Where replicas go: a board of free slots, and how jobs are packed on it. All policies share it.

Inside a decision nodes are numbered in the order of the view, and a `Row` is an allocation in these
numbers.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from common.types import Allocation, Node, Placement

Row: TypeAlias = tuple[tuple[int, int], ...]
"""(node number, replicas) in rank order of nodes; empty: no slots."""


def row_size(row: Row) -> int:
    return sum(replicas for _, replicas in row)


def number_nodes(nodes: Sequence[Node]) -> dict[str, int]:
    return {node.name: number for number, node in enumerate(nodes)}


def to_row(allocation: Allocation, numbers: Mapping[str, int]) -> Row:
    """The allocation in node numbers; empty where it names a node that is not there."""
    if any(p.node not in numbers for p in allocation):
        return ()
    return tuple((numbers[p.node], p.replicas) for p in allocation)


def to_allocation(row: Row, nodes: Sequence[Node], present: Allocation = ()) -> Allocation:
    """`row` as an allocation. Nodes of the `present` one come first, in their order, so that survivors
    keep their ranks; where nothing differs it is the present one itself."""
    here = {p.node: rank for rank, p in enumerate(present)}
    placements = [Placement(node=nodes[n].name, replicas=replicas) for n, replicas in row]
    ordered = tuple(sorted(placements, key=lambda p: here.get(p.node, len(here))))
    return present if ordered == present else ordered


def describe(allocation: Allocation) -> str:
    """For people: "2 replicas on node-1", "3 replicas on node-1 (2) and node-2 (1)"."""
    total = sum(p.replicas for p in allocation)
    count = f"{total} replica{'' if total == 1 else 's'}"
    if len(allocation) == 1:
        return f"{count} on {allocation[0].node}"
    parts = [f"{p.node} ({p.replicas})" for p in allocation]
    return f"{count} on {', '.join(parts[:-1])} and {parts[-1]}"


def keep_or_take_freest(
    counts: Sequence[int], present: Sequence[Allocation], nodes: Sequence[Node], order: Sequence[int]
) -> list[Allocation]:
    """The placement of Optimus and Tiresias in the published comparison: a job whose count is unchanged
    stays, and the others, in `order`, take from the freest nodes. One allocation a count, in rank order of
    taking. The counts must not exceed the slots."""
    board = Board([node.slots for node in nodes])
    numbers = number_nodes(nodes)
    placed: list[Allocation] = [()] * len(counts)
    for j, allocation in enumerate(present):
        row = to_row(allocation, numbers)
        if row and row_size(row) == counts[j] and board.fits(row):
            board.take(row)
            placed[j] = allocation
    for j in order:
        if counts[j] and not placed[j]:
            taken = board.from_the_freest(counts[j])
            assert taken is not None, "counts never exceed the slots"
            board.take(taken)
            placed[j] = tuple(Placement(node=nodes[n].name, replicas=replicas) for n, replicas in taken)
    return placed


class Board:
    """Free slots of every node while a decision is made.

    With `one_spread_a_node`, no node takes part in two jobs that span several nodes: these would slow
    each other down on the node's network (Pollux, section 4.2, interference avoidance).
    """

    def __init__(self, slots: Iterable[int], *, one_spread_a_node: bool = False) -> None:
        self.free = list(slots)
        self.one_spread_a_node = one_spread_a_node
        self.guests = [0] * len(self.free)
        self._by_free: list[list[int]] = [[] for _ in range(max(self.free, default=0) + 1)]
        for node, free in enumerate(self.free):
            self._by_free[free].append(node)
        self.spread_free = sum(self.free)
        """Free slots on nodes that another job spanning several nodes may use."""

    @property
    def largest_free(self) -> int:
        """Free slots of the freest node."""
        for nodes in reversed(self._by_free):
            if nodes:
                return self.free[nodes[0]]
        return 0

    def fits(self, row: Row) -> bool:
        spread = len(row) > 1
        for node, replicas in row:
            if self.free[node] < replicas or (spread and self._closed(node)):
                return False
        return True

    def without(self, rows: Iterable[Row]) -> "BoardView":
        """What would be free had these rows been given back, quicker to find than to give them back."""
        free: dict[int, int] = {}
        guests: dict[int, int] = {}
        for row in rows:
            spread = len(row) > 1
            for node, replicas in row:
                free[node] = free.get(node, self.free[node]) + replicas
                if spread:
                    guests[node] = guests.get(node, self.guests[node]) - 1
        largest, spread_free = self.largest_free, self.spread_free
        for node, slots in free.items():
            if slots > largest:
                largest = slots
            if not self._closed(node):
                spread_free += slots - self.free[node]
            elif guests.get(node) == 0:
                spread_free += slots
        return BoardView(self, largest, spread_free, free, guests)

    def take(self, row: Row) -> None:
        for node, replicas in row:
            self._change(node, -replicas, 1 if len(row) > 1 else 0)

    def give_back(self, row: Row) -> None:
        for node, replicas in row:
            self._change(node, replicas, -1 if len(row) > 1 else 0)

    def together(self, replicas: int, present: Row = ()) -> Row | None:
        """`replicas` on one node: one where the job is now, else the tightest; the first on ties."""
        for node, _ in present:
            if self.free[node] >= replicas:
                return ((node, replicas),)
        for level in self._by_free[replicas:]:
            if level:
                return ((level[0], replicas),)
        return None

    def spread(self, replicas: int, present: Row = ()) -> Row | None:
        """`replicas` on as few nodes as possible: the freest ones whole (those of the present row first
        among equals), and the rest on the tightest that holds it. On one node if one is enough."""
        if replicas > self.spread_free:
            return None
        here = {node for node, _ in present}
        row: list[tuple[int, int]] = []
        taken: set[int] = set()
        left = replicas
        for level in range(len(self._by_free) - 1, 0, -1):
            if left <= 0:
                break
            nodes = [n for n in self._by_free[level] if not self._closed(n)]
            for node in sorted(nodes, key=lambda n: n not in here):
                if left <= level:
                    tightest = self._tightest_open(left, taken)
                    row.append((tightest, left))
                    return tuple(row)
                row.append((node, level))
                taken.add(node)
                left -= level
        return tuple(row)

    def pack(self, replicas: int, present: Row = ()) -> Row | None:
        """On one node if one holds all, else on as few as possible; None where slots are short."""
        return self.together(replicas, present) or self.spread(replicas, present)

    def from_the_freest(self, replicas: int) -> Row | None:
        """From the node with the most free slots as many as it has, then from the next one, the first on
        ties; None where slots are short."""
        row: list[tuple[int, int]] = []
        left = replicas
        for level in range(len(self._by_free) - 1, 0, -1):
            for node in self._by_free[level]:
                if left <= 0:
                    return tuple(row)
                row.append((node, min(level, left)))
                left -= level
        return tuple(row) if left <= 0 else None

    def _closed(self, node: int) -> bool:
        return self.one_spread_a_node and self.guests[node] > 0

    def _tightest_open(self, replicas: int, taken: set[int]) -> int:
        return next(
            node
            for level in self._by_free[replicas:]
            for node in level
            if node not in taken and not self._closed(node)
        )

    def _change(self, node: int, slots: int, guests: int) -> None:
        free, by_free = self.free[node], self._by_free
        level = by_free[free]
        del level[bisect_left(level, node)]
        if not self.guests[node] or not self.one_spread_a_node:
            self.spread_free -= free
        free += slots
        self.guests[node] += guests
        if not self.guests[node] or not self.one_spread_a_node:
            self.spread_free += free
        self.free[node] = free
        insort(by_free[free], node)


@dataclass(slots=True)
class BoardView:
    """A board from which rows were given back. `free` and `guests` are of the nodes that this has changed."""

    board: Board
    largest_free: int
    spread_free: int
    free: dict[int, int]
    guests: dict[int, int]

    def fits(self, row: Row) -> bool:
        board, spread = self.board, len(row) > 1 and self.board.one_spread_a_node
        for node, replicas in row:
            if self.free.get(node, board.free[node]) < replicas:
                return False
            if spread and self.guests.get(node, board.guests[node]) > 0:
                return False
        return True
