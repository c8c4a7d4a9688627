"""What connects the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second that one receives within a node of `node_ranks`, and from outside."""

    node_ranks: int = 8
    within_node: float = 400e9
    between_nodes: float = 50e9

    def seconds(self, n_bytes: float, size: int) -> float:
        """Of bytes that come from `size - 1` ranks in equal parts, first those of the node, then the others."""
        near = min(size, self.node_ranks) - 1
        near_part = near / max(1, size - 1)
        return n_bytes * (near_part / self.within_node + (1 - near_part) / self.between_nodes)
