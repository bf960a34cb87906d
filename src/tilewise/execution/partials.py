"""A rank's partial results in a pass: where kernels add, what arrives is merged, what leaves."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tilewise.execution.allocator import Allocator, Scratch
from tilewise.execution.gather import Index, TensorPart, Tensors, pick
from tilewise.execution.pass_run import PassRun
from tilewise.kernels.protocol import deliver
from tilewise.plan.ir import Item, Role, Rows, Side
from tilewise.tiles.call_rows import span

Group = tuple[Item, ...]


class Partials(ABC):
    """Partials by item, each with its whole shard's rows.

    Those of operands that lie in one arena lie side by side as well, so that one kernel call can
    add to several in place. Such a one has its place once: from when it is first added to until it
    leaves.

    Args:
        groups: the operands of each arena.
    """

    def __init__(
        self,
        run: PassRun,
        allocator: Allocator,
        scratch: Scratch,
        groups: Iterable[Iterable[Item]] = (),
    ):
        self._run, self._allocator, self._scratch = run, allocator, scratch
        self._payload, self._sizes = run.payload, [layout.sizes for layout in run.layouts]
        self._made: dict[Item, Tensors] = {}
        self._starts: dict[Item, int] = {}  # first row among those of its group
        self._group: dict[Item, Group] = {}
        self._unused: set[Item] = set()
        self._whole: dict[Group, Tensors] = {}
        for items in groups:
            group = tuple([item._replace(role=Role.PARTIAL) for item in items])
            starts = accumulate(map(self.size, group), initial=0)
            self._starts.update(zip(group, starts, strict=False))
            self._group.update(dict.fromkeys(group, group))
            self._unused.update(group)

    @abstractmethod
    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        """Per tensor of a partial: what it is at first, and its width if it has one."""

    @abstractmethod
    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        """Add values to rows of a partial, in place."""

    def size(self, item: Item) -> int:
        """Rows of its shard."""
        return self._sizes[item.side][item.shard]

    def filled(self, item: Item) -> Tensors:
        """What a partial has come to."""
        return self._made.get(item) or self._empty(item)

    def made(self, item: Item) -> Tensors:
        """A partial to be added to in place."""
        found = self._made.get(item)
        if found is None:
            found = self._made[item] = self._empty(item)
        return found

    def leave(self, item: Item) -> Tensors:
        """What a partial has come to, which moves on."""
        tensors = self.filled(item)
        self._made.pop(item, None)
        self._starts.pop(item, None)
        return tensors

    def merge_arrived(self, item: Item, rows: Rows | None, values: Tensors) -> None:
        """Add what another rank has computed of these rows; None: of all."""
        if rows is None:
            self.add(item, None, values)
            return
        offset = 0
        for start, stop in rows:
            here = slice(offset, offset + stop - start)
            self.add(item, slice(start, stop), tuple([x[here] for x in values]))
            offset = here.stop

    def target(self, parts: Sequence[TensorPart], heads: slice | None) -> Tensors | None:
        """Where a kernel itself can add a call's results: neighbouring rows of partials, in order.

        None as well where the results may become the partial.
        """
        if heads is not None:
            return None
        if len(parts) != 1:
            return self._beside(parts)
        _, item, in_call, _, local = parts[0]
        if in_call is not None or isinstance(local, Tensor):
            return None
        may_become = local is None and self._allocator.adopts and item not in self._unused
        if may_become and item not in self._made:
            return None
        partials = self.made(item)
        return partials if local is None else tuple([x[local] for x in partials])

    def add_call(self, parts: Sequence[TensorPart], values: Tensors, heads: slice | None) -> None:
        """Add a call's results, which nobody else uses, to the partials that its rows belong to."""
        if len(parts) > 1 and heads is None and self._allocator.adopts:
            place = self._place(parts)
            if place is not None and self._untouched(place):
                # They become the partials of all shards that lie side by side.
                lasting, dtype = self._allocator.lasting, self._run.dtype
                self._whole[place[0]] = tuple([lasting(x, dtype) for x in values])
                return
        for part in parts:
            found = values
            if part.call is not None:
                found = tuple([pick(x, part.call, self._scratch) for x in values])
            if heads is None:
                self.add(part.item, part.local, found)
                continue
            mine = tuple([x[:, :, heads] for x in self.made(part.item)])
            self._merge(mine, part.local, found)

    def add(self, item: Item, index: Index, values: Tensors) -> None:
        """Add values, which nobody else uses, to rows of a partial."""
        if index is None and item not in self._made and item not in self._unused:
            lasting, dtype = self._allocator.lasting, self._run.dtype
            self._made[item] = tuple([lasting(x, dtype) for x in values])
        else:
            self._merge(self.made(item), index, values)

    def _empty(self, item: Item) -> Tensors:
        """A partial that nothing was added to."""
        if item not in self._unused:
            return self._blank(item.side, (self.size(item),))
        self._unused.remove(item)
        group, start = self._group[item], self._starts[item]
        if group not in self._whole:
            self._whole[group] = self._blank(item.side, [*map(self.size, group)])
        return tuple([x[start : start + self.size(item)] for x in self._whole[group]])

    def _blank(self, side: Side, rows: Sequence[int]) -> Tensors:
        """Partials of so many rows each, one after the other, that nothing was added to."""
        shape, dtype = (sum(rows), self._run.batch, self._payload.heads(side)), self._run.dtype
        return tuple(
            [
                self._allocator.take_parts((*shape, *width), dtype, rows).fill_(value)
                for value, *width in self._blanks(side)
            ]
        )

    def _beside(self, parts: Sequence[TensorPart]) -> Tensors | None:
        """Partials of several shards that lie side by side as their operands do."""
        place = self._place(parts)
        if place is None or (self._allocator.adopts and self._untouched(place)):
            return None
        for part in parts:
            self.made(part.item)
        group, start, stop = place
        return tuple([x[start:stop] for x in self._whole[group]])

    def _place(self, parts: Sequence[TensorPart]) -> tuple[Group, int, int] | None:
        """Where the results of a call's parts belong, if that is side by side and in order."""
        group = self._group.get(parts[0].item)
        if group is None or any(self._group.get(part.item) is not group for part in parts):
            return None
        sizes, starts = [], []
        for part in parts:
            sizes.append(self.size(part.item))
            starts.append(self._starts.get(part.item))
        whole = [part._replace(shard=i, block=part.local) for i, part in enumerate(parts)]
        rows = span(whole, sizes, starts)
        return None if rows is None else (group, *rows)

    def _untouched(self, place: tuple[Group, int, int]) -> bool:
        """Whether these are all rows of a group that nothing was added to."""
        group, start, stop = place
        return group not in self._whole and stop - start == sum(map(self.size, group))


class MergedPartials(Partials):
    """Of a forward pass: out and lse of queries, merged by lse, and the largest score."""

    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        statistics = ((-torch.inf,),) * (1 + self._payload.max_logit)
        return (0.0, self._payload.v_head_dim), *statistics

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        if index is None:
            deliver(values, partials)
            return
        rows = tuple([pick(x, index, self._scratch) for x in partials])
        deliver(values, rows)
        if isinstance(index, Tensor):  # an index made copies
            for total, merged in zip(partials, rows, strict=True):
                total.index_copy_(0, index, merged)


class SummedPartials(Partials):
    """Of a backward pass: dq of queries, dk and dv of keys and values, which are sums."""

    def _blanks(self, side: Side) -> Sequence[tuple[float, *tuple[int, ...]]]:
        return [(0.0, width) for _, width in self._payload.inputs(side)]

    def _merge(self, partials: Tensors, index: Index, values: Tensors) -> None:
        if partials[0].is_meta:  # shapes without values
            return
        for total, value in zip(partials, values, strict=True):
            if isinstance(index, Tensor):
                total.index_add_(0, index, value.to(total.dtype))
            else:
                pick(total, index, self._scratch).add_(value)
