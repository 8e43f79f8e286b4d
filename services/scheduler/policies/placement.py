"""Where replicas go: a board of free slots, and how jobs are packed on it. All policies share it.

Within a decision, nodes are numbered in the order of the view. A `Row` is an allocation that uses these
numbers instead of node names.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from common.types import Allocation, Node, Placement

Row: TypeAlias = tuple[tuple[int, int], ...]
"""(node number, replicas), the node with the first ranks first; empty: no slots."""


def row_size(row: Row) -> int:
    return sum(replicas for _, replicas in row)


def number_nodes(nodes: Sequence[Node]) -> dict[str, int]:
    return {node.name: number for number, node in enumerate(nodes)}


def to_row(allocation: Allocation, numbers: Mapping[str, int]) -> Row:
    """The allocation in node numbers; empty if it names a node that is gone."""
    if any(p.node not in numbers for p in allocation):
        return ()
    return tuple((numbers[p.node], p.replicas) for p in allocation)


def to_allocation(row: Row, nodes: Sequence[Node], present: Allocation = ()) -> Allocation:
    """`row` as an allocation. Nodes of the `present` allocation come first, in their order, so that surviving
    replicas keep their ranks. Returns `present` itself if nothing differs."""
    position = {p.node: number for number, p in enumerate(present)}
    placements = [Placement(node=nodes[n].name, replicas=replicas) for n, replicas in row]
    ordered = tuple(sorted(placements, key=lambda p: position.get(p.node, len(position))))
    return present if ordered == present else ordered


def describe(allocation: Allocation) -> str:
    """In words: "2 replicas on node-1", "3 replicas on node-1 (2) and node-2 (1)"."""
    total = sum(p.replicas for p in allocation)
    count = f"{total} replica{'' if total == 1 else 's'}"
    if len(allocation) == 1:
        return f"{count} on {allocation[0].node}"
    parts = [f"{p.node} ({p.replicas})" for p in allocation]
    return f"{count} on {', '.join(parts[:-1])} and {parts[-1]}"


def keep_unchanged(
    board: "Board",
    counts: Sequence[int],
    present: Sequence[Allocation],
    numbers: Mapping[str, int],
    order: Iterable[int],
) -> list[Allocation]:
    """Take the present placement of each job, in `order`, whose number of replicas stays the same and that
    still fits. The allocations of these jobs; () for the others."""
    kept: list[Allocation] = [()] * len(counts)
    for j in order:
        row = to_row(present[j], numbers)
        if row and row_size(row) == counts[j] and board.fits(row):
            board.take(row)
            kept[j] = present[j]
    return kept


def keep_or_pack(
    counts: Sequence[int], present: Sequence[Allocation], nodes: Sequence[Node], order: Iterable[int]
) -> list[Allocation]:
    """A job whose number of replicas stays the same keeps its placement; the others, largest first, are
    packed on as few nodes as possible. `order` decides who keeps its placement where not all fit.

    counts: replicas of each job, which together must not exceed the slots.
    """
    board, numbers = Board([node.slots for node in nodes]), number_nodes(nodes)
    placed = keep_unchanged(board, counts, present, numbers, order)
    movers = [j for j, count in enumerate(counts) if count and not placed[j]]
    for j in sorted(movers, key=lambda j: -counts[j]):
        packed = board.pack(counts[j], to_row(present[j], numbers))
        assert packed is not None, "counts never exceed the slots"
        board.take(packed)
        placed[j] = to_allocation(packed, nodes, present[j])
    return placed


def keep_or_take_freest(
    counts: Sequence[int], present: Sequence[Allocation], nodes: Sequence[Node], order: Sequence[int]
) -> list[Allocation]:
    """The placement of Optimus and Tiresias in the published comparison: a job whose number of replicas stays
    the same keeps its placement; the others, in `order`, take the freest nodes.

    counts: replicas of each job, which together must not exceed the slots.
    """
    board, numbers = Board([node.slots for node in nodes]), number_nodes(nodes)
    placed = keep_unchanged(board, counts, present, numbers, range(len(counts)))
    for j in order:
        if counts[j] and not placed[j]:
            taken = board.from_the_freest(counts[j])
            assert taken is not None, "counts never exceed the slots"
            board.take(taken)
            placed[j] = to_allocation(taken, nodes)
    return placed


class Board:
    """Free slots of every node while a decision is made.

    With `one_spread_a_node`, a node may hold replicas of at most one job that spans several nodes: two of
    them would slow each other down on the node's network (Pollux, section 4.2, interference avoidance).
    """

    def __init__(self, slots: Iterable[int], *, one_spread_a_node: bool = False) -> None:
        self.free = list(slots)
        self.one_spread_a_node = one_spread_a_node
        self.spread_jobs = [0] * len(self.free)
        """By node: jobs on it that span several nodes."""
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
        """What would be free if these rows were given back. Faster than giving them back."""
        free: dict[int, int] = {}
        spread_jobs: dict[int, int] = {}
        for row in rows:
            spread = len(row) > 1
            for node, replicas in row:
                free[node] = free.get(node, self.free[node]) + replicas
                if spread:
                    spread_jobs[node] = spread_jobs.get(node, self.spread_jobs[node]) - 1
        largest, spread_free = self.largest_free, self.spread_free
        for node, slots in free.items():
            if slots > largest:
                largest = slots
            if not self._closed(node):
                spread_free += slots - self.free[node]
            elif spread_jobs.get(node) == 0:
                spread_free += slots
        return BoardView(self, largest, spread_free, free, spread_jobs)

    def take(self, row: Row) -> None:
        for node, replicas in row:
            self._change(node, -replicas, 1 if len(row) > 1 else 0)

    def give_back(self, row: Row) -> None:
        for node, replicas in row:
            self._change(node, replicas, -1 if len(row) > 1 else 0)

    def together(self, replicas: int, present: Row = ()) -> Row | None:
        """`replicas` on one node: a node where the job is now, else the one with the fewest free slots that
        suffice; the first on ties."""
        for node, _ in present:
            if self.free[node] >= replicas:
                return ((node, replicas),)
        for level in self._by_free[replicas:]:
            if level:
                return ((level[0], replicas),)
        return None

    def spread(self, replicas: int, present: Row = ()) -> Row | None:
        """`replicas` on as few nodes as possible: all free slots of the freest nodes (nodes of the present
        row first among equals), and the rest on the node with the fewest free slots that suffice. On one node
        if one is enough; None if there are too few slots."""
        if replicas > self.spread_free:
            return None
        present_nodes = {node for node, _ in present}
        row: list[tuple[int, int]] = []
        taken: set[int] = set()
        left = replicas
        for level in range(len(self._by_free) - 1, 0, -1):
            if left <= 0:
                break
            nodes = [n for n in self._by_free[level] if not self._closed(n)]
            for node in sorted(nodes, key=lambda n: n not in present_nodes):
                if left <= level:
                    tightest = self._tightest_open(left, taken)
                    row.append((tightest, left))
                    return tuple(row)
                row.append((node, level))
                taken.add(node)
                left -= level
        return tuple(row)

    def pack(self, replicas: int, present: Row = ()) -> Row | None:
        """On one node if one holds all, else on as few as possible; None if there are too few slots."""
        return self.together(replicas, present) or self.spread(replicas, present)

    def from_the_freest(self, replicas: int) -> Row | None:
        """All slots of the freest node, then those of the next one, the first on ties; None if there are too
        few slots."""
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
        """Whether no other job that spans several nodes may use the node."""
        return self.one_spread_a_node and self.spread_jobs[node] > 0

    def _tightest_open(self, replicas: int, taken: set[int]) -> int:
        return next(
            node
            for level in self._by_free[replicas:]
            for node in level
            if node not in taken and not self._closed(node)
        )

    def _change(self, node: int, slots: int, spread_jobs: int) -> None:
        # Called very often, so it repeats the condition of `_closed` instead of calling it.
        free, by_free = self.free[node], self._by_free
        level = by_free[free]
        del level[bisect_left(level, node)]
        if not self.spread_jobs[node] or not self.one_spread_a_node:
            self.spread_free -= free
        free += slots
        self.spread_jobs[node] += spread_jobs
        if not self.spread_jobs[node] or not self.one_spread_a_node:
            self.spread_free += free
        self.free[node] = free
        insort(by_free[free], node)


@dataclass(slots=True)
class BoardView:
    """A board as if some rows were given back. `free` and `spread_jobs` hold the nodes that this changes."""

    board: Board
    largest_free: int
    spread_free: int
    free: dict[int, int]
    spread_jobs: dict[int, int]

    def fits(self, row: Row) -> bool:
        board, spread = self.board, len(row) > 1 and self.board.one_spread_a_node
        for node, replicas in row:
            if self.free.get(node, board.free[node]) < replicas:
                return False
            if spread and self.spread_jobs.get(node, board.spread_jobs[node]) > 0:
                return False
        return True
