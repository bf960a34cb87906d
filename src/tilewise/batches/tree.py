"""Sequences that share prefixes, as one sequence in which every shared token stands once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.arguments import (
    brief,
    listed,
    require_dense,
    require_type,
    whole_number,
    whole_numbers,
)
from tilewise.context_parallel import ContextParallel
from tilewise.layouts.layout import Layout, Run, contiguous
from tilewise.masks.base import Mask
from tilewise.masks.tables import Slices
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled
from tilewise.transport.resolve import transport_for

Array = np.ndarray


class Tree:
    """A trie of token sequences, laid out in depth-first order as one packed sequence.

        tree = tw.Tree.from_sequences([[1, 2, 3], [1, 2, 4, 5], [7]])
        tree.tokens         # 1 2 3 4 5 7
        tree.position_ids   # 0 1 2 2 3 0
        tree.rows(1)        # 0 1 3 4

    A token sees what it sees in each of its sequences alone, so a causal model that is given
    `mask` and `position_ids` computes for it what it computes there. Unrelated sequences are
    trees beside each other. `mask` is one like any other: balanced, needed, tiled and the
    planner serve it.

    Attributes:
        tokens: LongTensor [num_tokens]; a ValueError of a tree that was made without them.
        position_ids: LongTensor [num_tokens], each token's place in its sequences.
        parents: LongTensor [num_tokens], the row of the token before; -1 for a first token.
        counts: LongTensor [num_tokens], how many sequences contain the token: the weight of its
            label in a loss summed over sequences.
        mask: of two slices a node.
        num_tokens: of the tree; num_tokens_apart: of its sequences, each by itself.

    Source: prefix trees as in verl #6401 and Megatron-LM #7387, which keep them on one rank.
    """

    position_ids: Tensor
    parents: Tensor
    counts: Tensor
    mask: Mask

    def __init__(
        self, nodes: Sequence[_Node], paths: Sequence[Sequence[_Node]], knows_tokens: bool = True
    ):
        """Use `Tree.from_sequences` or `Tree.from_segments`.

        Args:
            nodes: in depth-first order.
            paths: of every sequence its nodes, from the first.
            knows_tokens: whether the nodes have their tokens, not only as many numbers.
        """
        stops = np.cumsum([len(node.tokens) for node in nodes]).tolist()
        below = {id(node): stop for node, stop in zip(nodes, stops, strict=True)}
        slices = []
        for node, stop in zip(nodes[::-1], stops[::-1], strict=True):
            node.start, last = stop - len(node.tokens), below[id(node)]
            node_range = node.start, stop
            slices += [(node_range, node_range, "causal"), ((stop, last), node_range, "full")]
            if node.parent:
                below[id(node.parent)] = max(below[id(node.parent)], last)
        columns = zip(*(node.columns() for node in nodes), strict=True)
        tokens, self.position_ids, self.parents, self.counts = (
            torch.from_numpy(np.concatenate(column)) for column in columns
        )
        self._tokens = tokens if knows_tokens else None
        self.mask = Slices(entry for entry in slices if entry[0][0] < entry[0][1])
        self.num_tokens = len(tokens)
        self._ranges = tuple(tuple(node.rows() for node in path) for path in paths)
        self.num_tokens_apart = int(self.counts.sum())

    @classmethod
    def from_sequences(cls, token_lists: Iterable[Any]) -> Tree:
        """The tree of these sequences.

        Equal sequences, and those that begin another, share all their tokens.

        Args:
            token_lists: of every sequence its tokens, a list, array or LongTensor of whole
                numbers from 0 on.
        Raises:
            ValueError: if there is no sequence, or one is empty or no such list.
        """
        sequences = [
            _checked(f"sequence {i}", tokens)
            for i, tokens in enumerate(listed("token_lists", token_lists, "sequences"))
        ]
        if not sequences:
            raise ValueError("token_lists has 0 sequences; give at least one")
        return cls(*_trie(sequences))

    @classmethod
    def from_segments(
        cls, cu_seqlens_q: Any, cu_seqlens_k: Any, kv_index: Any, tokens: Any = None
    ) -> Tree:
        """The tree of a row that is packed already, as TRL's `TreeRow.pack()` does it.

            row = trl_row.pack()
            tree = tw.Tree.from_segments(
                row["tree_cu_seqlens_q"], row["tree_cu_seqlens_k"], row["tree_kv_index"],
                tokens=row["input_ids"],
            )

        A segment is a run of tokens that the same sequences contain. Each segment that none
        continues ends one sequence. What belongs to the row (labels, token_index) keeps its place.

        Args:
            cu_seqlens_q: [num_segments + 1] borders of segments in the row.
            cu_seqlens_k: [num_segments + 1] borders of their keys in kv_index.
            kv_index: [num_keys] rows that segments see: those of the segments before it in its
                sequences, from the first, and its own.
            tokens: [num_tokens] of the row, for `shard` and `log_probs`; None: not known.
        Raises:
            ValueError: for borders that are none, and segments that are no tree in depth-first
                order.
        """
        borders = _borders("cu_seqlens_q", cu_seqlens_q)
        key_borders = _borders("cu_seqlens_k", cu_seqlens_k)
        keys = whole_numbers("kv_index", kv_index)
        if len(borders) != len(key_borders) or len(keys) != key_borders[-1]:
            raise ValueError(
                f"cu_seqlens_q has {len(borders)} borders, cu_seqlens_k {len(key_borders)} up to "
                f"{key_borders[-1]}, kv_index {len(keys)} rows; give as many borders of queries as "
                "of keys, and as many rows as cu_seqlens_k ends at"
            )
        numbers = np.zeros(borders[-1], np.int64) if tokens is None else _checked("tokens", tokens)
        if len(numbers) != borders[-1]:
            raise ValueError(
                f"tokens has {len(numbers)} entries, but cu_seqlens_q ends at {borders[-1]}"
            )
        return cls(*_segments(borders, key_borders, keys, numbers), tokens is not None)

    @property
    def tokens(self) -> Tensor:
        if self._tokens is None:
            raise ValueError("this tree has no tokens; pass tokens= to tw.Tree.from_segments")
        return self._tokens

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Tree({len(self._ranges)} sequences of {self.num_tokens_apart} tokens "
            f"in {self.num_tokens})"
        )

    @property
    def num_sequences(self) -> int:
        return len(self._ranges)

    def rows(self, sequence: int) -> Tensor:
        """Return where a sequence's tokens lie, in its order: LongTensor [its length]."""
        whole_number("sequence", sequence, 0, len(self._ranges) - 1)
        return torch.cat([torch.arange(*run) for run in self._ranges[sequence]])

    def windowed(self, width: int) -> Slices:
        """Return the mask of a layer with a sliding window: a token sees the last `width` tokens of
        its sequences up to itself.

            tree = tw.Tree.from_sequences([[1, 2, 3], [1, 2, 4, 5], [7]])
            tree.windowed(2)    # 5 sees 4 and itself, 4 sees 2 and itself

        Args:
            width: tokens, 1 or more.
        Raises:
            ValueError: for a width below 1.
        """
        whole_number("width", width, 1)
        slices = []
        for (start, stop), path in self._paths().items():
            edge = min(start + width, stop)
            slices.append(((start, edge), (start, edge), "causal"))
            slices.append(((edge, stop), (start + 1, stop), "bicausal"))
            for first, last in path:
                # Row i of the node sees key j of the node above from j = i + behind on.
                behind = int(self.position_ids[start] - self.position_ids[first]) - width + 1
                edge = min(max(start - behind, start), stop)
                keys = min(first + max(behind, 0), last), last
                slices.append(((start, edge), keys, "full"))
                slices.append(((edge, min(stop, edge + keys[1] - keys[0])), keys, "invcausal"))
        return Slices(x for x in slices if x[0][0] < x[0][1] and x[1][0] < x[1][1])

    def _paths(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        """Of the rows of every node, the rows of the nodes above it, from the first."""
        return {
            rows: ranges[:depth] for ranges in self._ranges for depth, rows in enumerate(ranges)
        }

    def shard(self, cp: ContextParallel) -> tuple[Tensor, Tensor]:
        """This rank's tokens and their position ids, LongTensors [num_rows] each."""
        self._check(cp)
        return cp.shard(self.tokens, 0), cp.shard(self.position_ids, 0)

    def log_probs(self, logits: Tensor, cp: ContextParallel | None = None) -> list[Tensor]:
        """Return for every sequence the log-probability of each token but the first, in its order.

        With cp the values are the same on every rank. Backward takes it that their gradient is,
        too, and counts it once: a loss of them is the whole loss on every rank, and parameters'
        gradients, summed over ranks, are the whole loss's.

        Args:
            logits: [num_tokens, vocabulary], or this rank's rows of it with cp; leading
                dimensions of 1 are allowed.
        Returns:
            a tensor [length - 1] a sequence, in the dtype of logits, at least float32.
        Raises:
            ValueError: if logits has other rows, or a vocabulary without one of the tokens; with
                cp on every rank.
        """
        if cp is None:
            children, _ = self._children(contiguous(self.num_tokens, 1))
            values = self._predicted(logits, np.arange(self.num_tokens), children)
        else:
            self._check(cp)
            values, children = self._gathered(logits, cp)
        by_row = values.new_zeros(self.num_tokens)
        by_row = by_row.index_copy(0, torch.from_numpy(children).to(values.device), values)
        return [by_row[self.rows(i).to(values.device)[1:]] for i in range(len(self._ranges))]

    def _children(self, layout: Layout) -> tuple[Array, Array]:
        """Rows that a row before predicts, by the rank that owns that one; how many a rank."""
        children = np.flatnonzero(self.parents.numpy() >= 0)
        owner = np.empty(self.num_tokens, np.int64)
        for rank in range(layout.world_size):
            owner[layout.rows(rank)] = rank
        owners = owner[self.parents.numpy()[children]]
        return children[np.argsort(owners, kind="stable")], np.bincount(
            owners, minlength=layout.world_size
        )

    def _predicted(self, logits: Tensor, rows: Array, children: Array) -> Tensor:
        """Log-probabilities of these rows' tokens, from logits of rows that hold their parents."""
        require_type(Tensor, "logits", logits, "what the model's head returned")
        require_dense("logits", logits)
        # a rank without tokens may have run the model on one row of padding
        if logits.ndim < 2 or logits.shape[:-1].numel() not in (len(rows), max(len(rows), 1)):
            raise ValueError(
                f"logits is {tuple(logits.shape)}, but there are {len(rows)} rows of tokens; "
                "pass [num_rows, vocabulary]"
            )
        vocabulary, largest = logits.shape[-1], int(self.tokens.max())
        if largest >= vocabulary:
            raise ValueError(
                f"logits has a vocabulary of {vocabulary}, but the tree has token {largest}"
            )
        local = np.empty(self.num_tokens, np.int64)
        local[rows] = np.arange(len(rows))
        at = torch.from_numpy(local[self.parents.numpy()[children]]).to(logits.device)
        logits = logits.reshape(-1, vocabulary)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits[at, self.tokens[torch.from_numpy(children)].to(logits.device)]
        return chosen - logits.logsumexp(-1)[at]

    def _gathered(self, logits: Tensor, cp: ContextParallel) -> tuple[Tensor, Array]:
        """All ranks' values, in the order of the rows that come with them."""
        transport = transport_for(cp.group)
        children, sizes = self._children(cp.layout)
        stops = np.cumsum(sizes)
        start, stop = int(stops[cp.rank] - sizes[cp.rank]), int(stops[cp.rank])
        rows = cp.layout.rows(cp.rank)
        own_values = settled(transport, lambda: self._predicted(logits, rows, children[start:stop]))
        runs = [[Run(int(b - n), int(n))] for b, n in zip(stops, sizes, strict=True)]
        if len(children) == 0:
            return own_values, children
        values = move_rows(
            own_values.detach(), gather_moves(Layout(len(children), runs), None), transport
        )
        return torch.cat([values[:start], own_values, values[stop:]]), children

    def _check(self, cp: ContextParallel) -> None:
        require_type(ContextParallel, "cp", cp)
        if cp.layout.num_tokens != self.num_tokens:
            raise ValueError(
                f"cp is for {cp.layout.num_tokens} tokens, but the tree has {self.num_tokens}; "
                "make it with num_tokens=tree.num_tokens, mask=tree.mask"
            )


@dataclass
class _Node:
    """A run of tokens that the same sequences contain."""

    tokens: Array
    place: int  # of its first token in the sequences
    parent: _Node | None
    order: int  # the first sequence that contains it
    count: int = 1  # of sequences that contain it
    children: list[_Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # sequences whose last token is its last
    start: int = 0  # its first row of the tree

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.place + len(self.tokens)

    def rows(self) -> tuple[int, int]:
        return self.start, self.start + len(self.tokens)

    def columns(self) -> tuple[Array, ...]:
        """Tokens, places, parents and counts of its rows."""
        parents = np.arange(self.start - 1, self.start + len(self.tokens) - 1)
        parents[0] = self.parent.rows()[1] - 1 if self.parent else -1
        return (
            self.tokens,
            np.arange(self.place, self.end),
            parents,
            np.full(len(self.tokens), self.count),
        )

    def split(self, place: int) -> None:
        """Keep what lies before a place; the rest becomes the only child."""
        tokens_before, tokens_behind = np.split(self.tokens, [place - self.place])
        rest = _Node(tokens_behind, place, self, self.order, self.count, self.children, self.ends)
        for child in rest.children:
            child.parent = rest
        self.tokens, self.children, self.ends = tokens_before, [rest], []


def _trie(sequences: Sequence[Array]) -> tuple[list[_Node], list[list[_Node]]]:
    """Nodes in depth-first order, those of earlier sequences first, and each sequence's nodes."""
    # Compared as bytes with the most significant first: numbers from 0 on keep their order.
    keys = [tokens.astype(">i8").tobytes() for tokens in sequences]
    root = _Node(np.empty(0, np.int64), 0, None, 0)
    path, previous_tokens = [root], np.empty(0, np.int64)
    for i in sorted(range(len(sequences)), key=keys.__getitem__):
        tokens = sequences[i]
        shared = _shared(previous_tokens, tokens)
        while path[-1].place >= shared and path[-1] is not root:
            path.pop()
        if path[-1].end > shared:
            path[-1].split(shared)
        for node in path:
            node.order, node.count = min(node.order, i), node.count + 1
        if shared < len(tokens):
            path[-1].children.append(_Node(tokens[shared:], shared, path[-1], i))
            path.append(path[-1].children[-1])
        path[-1].ends.append(i)
        previous_tokens = tokens
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += sorted(node.children, key=lambda child: -child.order)
    paths: list[list[_Node]] = [[] for _ in sequences]
    above: dict[int, list[_Node]] = {id(root): []}
    for node in nodes[1:]:
        path = above[id(node)] = [*above[id(node.parent)], node]
        for i in node.ends:
            paths[i] = path
    for child in root.children:
        child.parent = None
    return nodes[1:], paths


def _segments(
    borders: Sequence[int], key_borders: Sequence[int], keys: Array, tokens: Array
) -> tuple[list[_Node], list[list[_Node]]]:
    """Nodes of segments, and of every sequence its nodes: each ends at a node without children."""
    nodes: list[_Node] = []
    path: list[_Node] = []  # from the first to the latest segment
    for i, (start, stop) in enumerate(pairwise(borders)):
        segment_keys = keys[key_borders[i] : key_borders[i + 1]]
        num_before = len(segment_keys) - (stop - start)
        while path and path[-1].end > num_before:
            path.pop()
        rows = [np.arange(*node.rows()) for node in path] + [np.arange(start, stop)]
        if start == stop or not np.array_equal(np.concatenate(rows), segment_keys):
            raise ValueError(
                f"segment {i} has queries {start}..{stop - 1} and keys "
                f"{segment_keys.tolist()!s:.60}, but keys must be the rows of the segments before "
                "it in its sequences, from the first, and its own; segments in depth-first "
                "order, none empty"
            )
        node = _Node(tokens[start:stop], num_before, path[-1] if path else None, i, 0, start=start)
        if path:
            path[-1].children.append(node)
        path.append(node)
        nodes.append(node)
    paths = [_from_first(node) for node in nodes if not node.children]
    for node in chain.from_iterable(paths):
        node.count += 1
    return nodes, paths


def _from_first(node: _Node | None) -> list[_Node]:
    """The nodes before a node and itself, from the first."""
    path: list[_Node] = []
    while node:
        path.append(node)
        node = node.parent
    return path[::-1]


def _borders(name: str, cu_seqlens: Any) -> list[int]:
    borders = whole_numbers(name, cu_seqlens)
    if len(borders) < 2 or borders[0] != 0 or np.any(np.diff(borders) < 0):
        raise ValueError(
            f"{name} ({brief(cu_seqlens)}) must be ascending borders that begin with 0"
        )
    return borders.tolist()


def _shared(a: Array, b: Array) -> int:
    """Return how many tokens two sequences begin with in common."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def _checked(name: str, tokens: Any) -> Array:
    array = whole_numbers(name, tokens)
    if len(array) == 0 or array.min() < 0:
        raise ValueError(
            f"{name} ({brief(tokens)}) must be a list of one or more token ids from 0 on"
        )
    return array
