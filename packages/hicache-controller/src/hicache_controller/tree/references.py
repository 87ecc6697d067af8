"""TreeReferences: locks and cuts for engines that keep nodes instead of matches."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hicache_kernels.validation import whole

from .loading import TreeLoads
from .node import TreeNode


class TreeReferences(TreeLoads):
    """Counted locks of single nodes, beside those that matches hold.

    A lock keeps the node's full attention in one tier, and with it that of its whole prefix. Windowed pools are kept by
    matches and pins alone, as what they need depends on where a prefix ends.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._references: Counter[tuple[int, bool]] = Counter()

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Keep a node on the device until as many calls of :meth:`dec_lock_ref`.

        Raises
        ------
        ValueError
            Where the node is not in the tree, or not on the device.
        """
        self._check_part(node, node.device, "device")
        self._references[node.id, True] += 1
        node.device_lock += 1

    def dec_lock_ref(self, node: TreeNode) -> None:
        """Undo one :meth:`inc_lock_ref`; ValueError where there is none left."""
        self._take_reference(node, device=True)
        self._unlock_device(node)

    def inc_host_lock_ref(self, node: TreeNode) -> None:
        """Keep a node on the host until as many calls of :meth:`dec_host_lock_ref`.

        Raises
        ------
        ValueError
            Where the node is not in the tree, or not on the host.
        """
        self._check_part(node, node.host, "host")
        self._references[node.id, False] += 1
        node.host_lock += 1

    def dec_host_lock_ref(self, node: TreeNode) -> None:
        """Undo one :meth:`inc_host_lock_ref`; ValueError where there is none left."""
        self._take_reference(node, device=False)
        self._unlock_host(node)

    def split(self, node: TreeNode, pages: int) -> TreeNode:
        """Cut a node in two.

        Parameters
        ----------
        node
            Stays as the tail, with its locks and transfers in flight.
        pages
            Of the new head, at least one and fewer than the node has.

        Returns
        -------
        TreeNode
            The head.

        Raises
        ------
        ValueError
            Where the node is not in the tree, is its root, or has too few pages.
        """
        if node is self.root or not self._is_alive(node):
            raise ValueError(f"node {node.id} is the root or not in the tree; accepted is another node of the tree")
        pages = whole("pages", pages, least=0)
        if not 0 < pages < node.pages:
            raise ValueError(f"pages is {pages}; node {node.id} has {node.pages}, and accepted is less, but at least 1")
        return self._split(node, pages)

    def evict(self, count: int) -> int:
        """Free at least ``count`` device pages if the unlocked leaves allow; as :meth:`evict_device`."""
        return self.evict_device(count)

    def _check_part(self, node: TreeNode, part: object | None, tier: str) -> None:
        if not self._is_alive(node):
            raise ValueError(f"node {node.id} is not in the tree; accepted is one that is")
        if part is None and node is not self.root:
            raise ValueError(f"node {node.id} is not on the {tier}; accepted is one that is")

    def _take_reference(self, node: TreeNode, *, device: bool) -> None:
        if not self._references[node.id, device]:
            tier = "device" if device else "host"
            raise ValueError(f"node {node.id} has no lock reference on the {tier}; each is given back once")
        self._references[node.id, device] -= 1
        if not self._references[node.id, device]:
            del self._references[node.id, device]
