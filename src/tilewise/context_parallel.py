"""ContextParallel: the short way to a sequence split over the ranks of a group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tilewise.arguments import (
    DtypeName,
    Reduction,
    Save,
    Validate,
    brief,
    dtype_name,
    explains_other_names,
    is_word,
    of_kind,
    require_type,
    whole_number,
)
from tilewise.compiler.rank_plan import RankPlan
from tilewise.compiler.row_moves import RowMoves
from tilewise.execution.call import autocast_dtype, operand_dtype
from tilewise.functional import attention
from tilewise.indexed.chosen import Chosen
from tilewise.kernels.bias import Alibi
from tilewise.kernels.protocol import Kernel
from tilewise.kernels.registry import given_kernel
from tilewise.layouts.balanced import default_layout
from tilewise.layouts.layout import Layout
from tilewise.masks.base import Document, Full, Mask
from tilewise.plan.ir import Plan
from tilewise.strategies.ring import ring
from tilewise.tokens.conv import causal_conv1d
from tilewise.tokens.dropout import check_dropout, dropped
from tilewise.tokens.gather import gather_by, gathers_in_stages
from tilewise.tokens.gradients import GradientTerms, OwnGradients, sum_gradients
from tilewise.tokens.joint import owned_rows
from tilewise.tokens.moves import gather_moves, halo_moves, relayout_moves, roll_moves
from tilewise.tokens.pieces import Piece, few_pieces, pieces_of
from tilewise.tokens.relaid import relaid
from tilewise.tokens.rows import move_rows, row_fields
from tilewise.tokens.scan import scan
from tilewise.transport.agreement import settled
from tilewise.transport.means import FAST_SUM, mean_over_ranks
from tilewise.transport.resolve import Group, transport_for
from tilewise.wires.wire import AnyWire, latent_of, wires_of
from tilewise.workload import Workload

if TYPE_CHECKING:
    from tilewise.simulation.machine import Machine

MOST_PADDING = 1 << 12
"""Rows of a halo of a sequence that is shorter: all of them are fill."""


class ContextParallel:
    """A group, a layout, a mask and a strategy that belong together.

        cp = tw.ContextParallel(mesh["cp"], num_tokens=len(tokens), mask=tw.Causal())
        x = cp.shard(embeddings, dim=0)         # this rank's rows; cp.position_ids goes with them
        out = cp.attention(q, k, v)
        logits = cp.unshard(head(out), dim=0)   # the whole sequence on every rank

    Args:
        mesh_or_group: a one-dimensional DeviceMesh, or what attention takes as group.
        num_tokens: length of the whole sequence; need not divide by the number of ranks.
        mask: for all calls of attention that do not name another.
        strategy: a plan, or "auto": at the first call the planner's choice, for its shapes. Of what
            `BatchStep.prepare` made, num_tokens, mask and layout are known, and may be left out.
        layout: None: contiguous for Full, zigzag for Causal and where else it gives every rank the
            same work, balanced for all other masks. `hf.parallelize` chooses the layouts of a model
            with layers that carry a state, if neither is given and nothing has read them.
        attention_layout: of the rows within attention; None: layout. q, k and v move there before
            each call of attention, its results back after (models whose other layers are cheaper
            on contiguous tokens).
        machine: that "auto" plans for, the same on all ranks; None: the preset "h100x8" for CUDA
            tensors, "cpu-gloo" for others.
        kernel: what attention takes as kernel, for all calls that do not name another.
        reduction: what attention takes as reduction, for all calls; "auto" then takes plans alone
            that can keep its promise. "canonical": layouts that are not given have whole blocks of
            tokens on each rank, `by_blocks` runs layers on these, and mean and sum_gradients have
            the same bits at any split (docs/numerics.md).
    """

    def __init__(  # noqa: PLR0913 - a constructor of a value
        self,
        mesh_or_group: DeviceMesh | Group = None,
        *,
        num_tokens: int | None = None,
        mask: Mask | None = None,
        strategy: Literal["auto"] | Plan = "auto",
        layout: Layout | None = None,
        attention_layout: Layout | None = None,
        machine: Machine | None = None,
        kernel: Kernel | str | None = None,
        reduction: Reduction = "fast",
    ):
        if isinstance(mesh_or_group, DeviceMesh):
            mesh_or_group = _group_of(mesh_or_group)
        if num_tokens is None and isinstance(mesh_or_group, int):
            raise ValueError(
                f"mesh_or_group ({mesh_or_group}) must be a group or a mesh, and num_tokens is "
                f"missing; pass the number of tokens by its name: num_tokens={mesh_or_group}"
            )
        if not isinstance(strategy, Plan) and not is_word(strategy, "auto"):
            raise ValueError(
                f"strategy ({brief(strategy)}) must be 'auto' or a plan, such as tw.ring(8)"
            )
        if isinstance(strategy, RankPlan) and strategy.made_for:
            mask = strategy.made_for[0] if mask is None else mask
            layout = strategy.made_for[1] if layout is None else layout
            num_tokens = strategy.made_for[1].num_tokens if num_tokens is None else num_tokens
        num_tokens = whole_number("num_tokens", num_tokens)
        self.group = mesh_or_group
        transport = transport_for(mesh_or_group)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.mask = Full() if mask is None else require_type(Mask, "mask", mask)
        self.mask.check_tokens(num_tokens)
        self.reduction = of_kind("reduction", reduction, Reduction)
        self._layouts_open = layout is None and attention_layout is None
        if layout is None:
            layout = default_layout(self.mask, num_tokens, self.world_size)
            if reduction == "canonical":
                from tilewise.exact.by_blocks import whole_layout

                layout = whole_layout(layout)
        self._layouts = self._checked_layouts(num_tokens, layout, attention_layout)
        if machine is not None:
            from tilewise.simulation.machine import Machine

            require_type(Machine, "machine", machine)
        self.machine = machine
        if kernel is not None:
            given_kernel(kernel)
        self.kernel = kernel
        self.strategy: Literal["auto"] | Plan = strategy
        self._plan = strategy if isinstance(strategy, Plan) else None
        self._backward_plan: Plan | None = None
        self._for_one_mask = False
        self._reason = ""  # in words, why the plan was taken
        self._gradients: GradientTerms = OwnGradients()
        self._addition = FAST_SUM
        if reduction == "canonical":
            from tilewise.exact.by_blocks import EXACT_SUM, GradientSums

            self._gradients, self._addition = GradientSums(), EXACT_SUM

    def __repr__(self) -> str:
        plan = "auto" if self._plan is None else f"{self._plan.name}{self._reason}"
        layout, within = self._layouts
        attention = "" if within is layout else f", attention on {within!r}"
        return (
            f"ContextParallel(rank {self.rank} of {self.world_size}, {layout!r}{attention}, "
            f"{self.mask!r}, {plan})"
        )

    def _checked_layouts(
        self, num_tokens: int, layout: Layout, attention_layout: Layout | None
    ) -> tuple[Layout, Layout]:
        """The layouts of tokens and of attention, one object if they are equal."""
        within = layout if attention_layout is None else attention_layout
        for name, x in (("layout", layout), ("attention_layout", within)):
            require_type(Layout, name, x)
            if (x.num_tokens, x.world_size) != (num_tokens, self.world_size):
                raise ValueError(
                    f"{name} is for {x.num_tokens} tokens on {x.world_size} ranks, not for "
                    f"{num_tokens} on {self.world_size}; make it for these"
                )
            if attention_layout is not None and not x.is_partition:
                raise ValueError(
                    f"{name} is {x!r}, {sum(x.sizes)} rows for {x.num_tokens} tokens; beside an "
                    "attention_layout every token must belong to exactly one rank: leave "
                    "attention_layout out"
                )
        return layout, layout if within == layout else within

    @property
    def layouts_are_open(self) -> bool:
        """True if no layout was given, and none has been read: a planner may choose both."""
        return self._layouts_open

    def choose_layouts(self, layout: Layout, attention_layout: Layout | None = None) -> None:
        """Take a planner's layouts of the tokens and of attention, the same on every rank.

        Raises:
            ValueError: if layouts were given, or tokens may have been split by one already.
        """
        if not self._layouts_open:
            raise ValueError(
                f"{self!r} has its layout already: it was given, or tokens were split by it; pass "
                "layout and attention_layout when it is made"
            )
        num_tokens = self._layouts[0].num_tokens
        self._layouts = self._checked_layouts(num_tokens, layout, attention_layout)
        self._layouts_open = False

    @property
    def layout(self) -> Layout:
        """The tokens that each rank holds, in all layers but within attention."""
        if self._layouts_open:
            self._layouts_open = False
        return self._layouts[0]

    @property
    def attention_layout(self) -> Layout:
        """The tokens that each rank has within attention: of layout, if no other was given."""
        if self._layouts_open:
            self._layouts_open = False
        return self._layouts[1]

    @property
    def moves_rows(self) -> bool:
        """True if attention runs on another layout than that of the tokens."""
        return self.attention_layout is not self.layout

    @property
    def num_tokens(self) -> int:
        """Length of the whole sequence."""
        return self._layouts[0].num_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """A copy of a model that holds it shares it: a process group cannot be copied."""
        return self

    def __copy__(self) -> ContextParallel:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: its group belongs to this process. Pass cp.layout and "
            "cp.rank to a data loader's worker, which has no group, and make a ContextParallel in "
            "every process that has joined one"
        )

    @cached_property
    def position_ids(self) -> Tensor:
        """Global positions of this rank's rows, a LongTensor [num_rows]."""
        return self.layout.positions(self.rank)

    def shard(self, x: Tensor, dim: int = -3) -> Tensor:
        """This rank's rows of a whole tensor, along its token dimension."""
        return self.layout.shard(x, self.rank, dim)

    def unshard(self, x: Tensor, dim: int = -3) -> Tensor:
        """The whole tensor on every rank; its backward sums over ranks, then shards."""
        return self.gather(x, dim)

    def gather(self, x: Tensor, dim: int = 0, mask: Mask | None = None) -> Tensor:
        """All rows of the sequence in order, on every rank; its backward sums into their owners.

        Args:
            x: this rank's rows.
            dim: of its tokens. Of replicated tokens the result has one rank's rows, and that rank
                the gradient.
            mask: only the rows that this rank's queries see travel, the others are 0; None: all.

        If cp's strategy is a plan that gathers before it computes, rows travel in its stages:
        `hierarchical(all_gather(nodes), all_gather(node_size))` sends a row once to each node.

        Raises:
            ValueError: the same on every rank, if one rank's rows do not fit, or the ranks differ.
        """

        def moves() -> RowMoves:
            if mask is not None:
                require_type(Mask, "mask", mask).check_tokens(self.layout.num_tokens)
            return gather_moves(self.layout, mask)

        transport = transport_for(self.group)
        x = settled(transport, lambda: owned_rows(x, self.layout, self.rank, dim))
        direct = settled(transport, moves)
        if isinstance(self.strategy, Plan) and gathers_in_stages(self.strategy):
            settled(transport, lambda: row_fields(x, direct, self.rank, dim))
            return gather_by(self.strategy, x, self.layout, mask, transport, dim)
        return move_rows(x, direct, transport, dim)

    def relayout(self, x: Tensor, to: Layout, dim: int = 0) -> Tensor:
        """This rank's rows under another layout of the same tokens; what changes owner travels.

            x = cp.relayout(x, tw.contiguous(num_tokens, cp.world_size))

        Args:
            x: this rank's rows under cp.layout.
            to: gives every token to exactly one rank of this group.
            dim: of the tokens.
        Raises:
            ValueError: the same on every rank, if the layout is for others, or as gather does.
        """

        def moves() -> RowMoves:
            require_type(Layout, "to", to)
            mine, other = self.layout, to
            sizes = (mine.num_tokens, mine.world_size), (other.num_tokens, other.world_size)
            if sizes[0] != sizes[1] or not other.is_partition:
                raise ValueError(
                    f"to is {other!r}, but must give each of {mine.num_tokens} tokens to one of "
                    f"{mine.world_size} ranks, as {mine!r} does"
                )
            return relayout_moves(mine, other)

        transport = transport_for(self.group)
        return move_rows(x, settled(transport, moves), transport, dim)

    def gather_rows(self, x: Tensor, positions: Tensor, dim: int = 0) -> Tensor:
        """The rows of the whole tensor at positions that this rank names, wherever they lie.

            rows = cp.gather_rows(latents, cp.index(q_index, k_index, weights, k=64))

        Each row is sent to a rank once, however often it is named there; its backward sums into
        the owners, in an order that does not change from run to run. Where ranks name more than
        three quarters of all rows, all travel, as in gather. Each rank that has named rows calls
        backward.

        Args:
            x: this rank's rows along dim; dimensions before it are of the batch.
            positions: any number of global positions, in any order, of any shape; -1 names no row:
                its result is 0. With dim above 0 one list for all entries of the batch, or
                [*x.shape[:dim], ...], a list for each entry.
        Returns:
            [*positions.shape, *x.shape[dim + 1:]], and x.shape[:dim] before it where one list
            serves all entries.
        Raises:
            ValueError: the same on every rank, before rows travel, if one rank's positions are none
                of the sequence, or as gather does.
        """
        from tilewise.tokens.named_rows import gather_rows

        transport, gather = transport_for(self.group), partial(self.gather, dim=dim)
        return gather_rows(x, positions, self.layout, transport, dim, gather)

    def index(
        self,
        q_index: Tensor,
        k_index: Tensor,
        weights: Tensor,
        k: int,
        mask: Mask | None = None,
        cu_seqlens: Any = None,
    ) -> Tensor:
        """The keys that an indexer chooses for this rank's queries: those of the k largest scores.

            chosen = cp.index(q_index, k_index, weights, k=2048)
            out = cp.attention(q, k, v, mask=tw.Chosen(chosen))

        score = sum over heads of weights relu(q_index . k_index), in fp32 (fp64 for fp64); of keys
        with equal scores the lower positions. The choice is the same at any split. Index keys that
        this rank's queries see travel, nothing else; without gradients.

        Args:
            q_index: [(batch,) this rank's tokens, heads, width].
            k_index: [(batch,) this rank's tokens, width].
            weights: [(batch,) this rank's tokens, heads].
            k: up to the tokens of the sequence.
            mask: of the keys that a query may choose; None: the one given at the start.
            cu_seqlens: boundaries of packed documents beside the mask; None: none.
        Returns:
            Global positions, int64 [(batch,) this rank's tokens, k], in any order; -1 where a query
            sees fewer than k keys.
        Raises:
            ValueError: the same on every rank, before rows travel, if one rank's operands do not
                fit, or the ranks' indexers differ.
        """
        from tilewise.indexed.choice import choose_keys

        def visible() -> Mask:
            wanted = self.mask if mask is None else require_type(Mask, "mask", mask)
            wanted.check_tokens(self.num_tokens)
            edges = self._boundaries(cu_seqlens)
            return wanted if cu_seqlens is None else wanted & Document(edges)

        transport = transport_for(self.group)
        wanted = settled(transport, visible)
        seen = None if wanted == Full() else wanted
        gather = partial(self.gather, mask=seen)
        operands = q_index, k_index, weights
        return choose_keys(*operands, k, wanted, self.layout, transport, gather)

    def pieces(self, cu_seqlens: Any = None) -> list[Piece]:
        """The contiguous pieces of this rank's tokens, cut at document borders, as (start, stop).

        They are global positions, in the order of this rank's rows.

        Args:
            cu_seqlens: boundaries of packed documents, of the whole sequence; None: one document.
        """
        return pieces_of(self.layout, self.rank, self._boundaries(cu_seqlens))

    def halo(
        self,
        x: Tensor,
        left: int,
        right: int = 0,
        dim: int = 0,
        cu_seqlens: Any = None,
        fill: float = 0,
    ) -> list[Tensor]:
        """Each piece of this rank's tokens with the rows before and after it in the sequence.

            for rows in cp.halo(x, left=3):         # [3 + tokens of the piece, ...]
                out = convolution(rows)

        Only rows that other ranks have and this one needs travel. Differentiable.

        Args:
            x: this rank's rows.
            left, right: number of rows before and after, at least 0.
            dim: of the tokens.
            cu_seqlens: boundaries of packed documents, of the whole sequence; None: one document.
            fill: in place of rows beyond the border of a piece's document.
        Returns:
            One tensor for each of `pieces(cu_seqlens)`, left + right rows longer than that.
        Raises:
            ValueError: the same on every rank, if a rank has more than 64 pieces (striped layouts;
                relayout before), or as gather does.
        """

        def moves() -> RowMoves:
            most = max(self.layout.num_tokens, MOST_PADDING)
            sizes = whole_number("left", left, 0, most), whole_number("right", right, 0, most)
            return halo_moves(self.layout, *sizes, edges)

        transport = transport_for(self.group)
        edges = settled(transport, lambda: self._boundaries(cu_seqlens))
        rows = move_rows(x, settled(transport, moves), transport, dim, fill)
        pieces = few_pieces(self.layout, edges, "halo")[self.rank]
        return [*rows.split([left + stop - start + right for start, stop in pieces], dim)]

    def conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: Any = None,
    ) -> Tensor:
        """Short causal depthwise convolution along the whole sequence, as causal_conv1d's.

        out[t] = activation(bias + sum over w of weight[:, w] x[t - width + 1 + w])

        Args:
            x: [(batch,) this rank's tokens, channels].
            weight: [channels, width], the same on every rank.
            bias: [channels].
            activation: None, "silu" or "swish".
            cu_seqlens: boundaries of packed documents; tokens of another document count as 0.
        Returns:
            As x. Gradients of weight and bias are this rank's share.
        Raises:
            ValueError: as halo, and for shapes that do not fit, with both.
        """
        transport = transport_for(self.group)
        edges = settled(transport, lambda: self._boundaries(cu_seqlens))
        return causal_conv1d(x, weight, bias, activation, self.layout, edges, transport)

    def scan(
        self,
        decay: Tensor,
        update: Tensor,
        *,
        matrix: bool = False,
        cu_seqlens: Any = None,
        dim: int | None = None,
    ) -> Tensor:
        """The state before each of this rank's pieces, where a piece maps S to decay * S + update.

            before = cp.scan(decay, update)         # then each piece starts from its own

        States begin at 0 in every document. Messages have the size of a state and a decay,
        whatever the length, and their number grows with the logarithm of that of pieces.

        Args:
            decay, update: [(batch,) pieces, ...], of `pieces(cu_seqlens)` in order. decay may have
                sizes of 1, or lack the last dimensions: it counts for all of the state there.
            matrix: decay is [..., d, d] and update [..., d, e]: S becomes decay @ S + update.
            cu_seqlens: boundaries of packed documents, of the whole sequence; None: one document.
            dim: of pieces, 0 or 1; None: the one whose sizes are the ranks' numbers of pieces.
        Returns:
            As update, differentiable in both.
        Raises:
            ValueError: the same on every rank: as halo, for shapes that do not fit, with both, and
                without dim where both dimensions have as many entries as a rank has pieces.
        """
        transport = transport_for(self.group)
        edges = settled(transport, lambda: self._boundaries(cu_seqlens))
        return scan(decay, update, self.layout, edges, transport, matrix=matrix, dim=dim)

    def roll(
        self,
        x: Tensor,
        shifts: int,
        dim: int = 1,
        cu_seqlens: Any = None,
        fill: float = -100,
        wrap: bool = False,
    ) -> Tensor:
        """This rank's rows of the whole tensor rolled along its tokens, within each document.

        Row t gets row t - shifts of the whole sequence, wherever that lies: shifts=-1 makes labels
        of next tokens, -2 those of the second token ahead. Rows whose source lies in another
        document, or outside the sequence, get fill. Every rank calls it; rows that change owner
        travel. Differentiable.

        Args:
            x: this rank's rows.
            cu_seqlens: boundaries of packed documents, of the whole sequence; None: one document.
            wrap: rows that leave a document at one end come in at the other, in place of fill.
        Raises:
            ValueError: the same on every rank, if one rank's arguments do not fit, or they differ.
        """

        def moves() -> RowMoves:
            n, distance = self.layout.num_tokens, of_kind("shifts", shifts, int)
            if not require_type(bool, "wrap", wrap, "True"):
                distance = max(-n, min(distance, n))
            return roll_moves(self.layout, distance, self._boundaries(cu_seqlens), wrap=wrap)

        transport = transport_for(self.group)
        return move_rows(x, settled(transport, moves), transport, dim, fill)

    def dropout(
        self, x: Tensor, p: float, seed: int, dim: int = 0, training: bool = True
    ) -> Tensor:
        """Drop a share p of this rank's numbers, by the global position of each row.

            x = x + cp.dropout(mlp(x), 0.1, seed=step * num_layers + layer)

        The same numbers of the whole sequence are dropped on any number of ranks, under any layout,
        in backward and in recomputation. The others grow by 1 / (1 - p). Nothing travels.

        Args:
            x: this rank's rows.
            p: from 0 on and below 1.
            seed: from 0 on, the same on every rank; another for each layer and step.
            dim: of the tokens.
            training: False: x is returned as it is.
        Raises:
            ValueError: the same on every rank, if one rank's arguments do not fit.
        """
        transport, num_rows = transport_for(self.group), self.layout.size(self.rank)
        checks = partial(check_dropout, x, p, seed, num_rows, dim, training=training)
        settled(transport, checks)
        return dropped(x, p, seed, self.position_ids, dim) if training else x

    def _boundaries(self, cu_seqlens: Any) -> tuple[int, ...]:
        """Boundaries of documents that end where the sequence does."""
        n = self.layout.num_tokens
        if cu_seqlens is None:
            return 0, n
        edges = Document(cu_seqlens).cu_seqlens
        if edges[-1] != n:
            raise ValueError(f"cu_seqlens ends at {edges[-1]}, but the sequence has {n} tokens")
        return edges

    def mean(self, losses: Tensor, count: Tensor | float) -> Tensor:
        """The whole sequence's mean loss, the same number on every rank.

        Its backward gives this rank's share: gradients summed over ranks are the whole's. Ranks
        without a label pass 0 and 0; where no rank has one, the mean is not a number.

        Args:
            losses: this rank's losses, as of cross_entropy(..., reduction="none"), or their sum.
                With reduction="canonical" those of each token: a sum's bits depend on the split.
            count: how many losses that is: of labels that are not ignored.
        Raises:
            ValueError: the same on every rank, if one rank's arguments are no such numbers.
        """
        return mean_over_ranks(losses, count, transport_for(self.group), self._addition)

    def by_blocks(self, module: torch.nn.Module, *inputs: Tensor, dim: int = 0) -> Any:
        """Run a layer that treats each token by itself: a linear layer, a norm, an MLP, a head.

            x = x + cp.by_blocks(mlp, x)
            q, k, v = cp.by_blocks(projections, x, cp.position_ids)

        With reduction="fast" it is module(*inputs). With "canonical" the layer runs on blocks of 64
        tokens at fixed places of the sequence, so that the bits of its rows do not depend on the
        split, and keeps what each block adds to the gradients of its parameters for sum_gradients:
        24 bytes a number, until then. Other layers may share the parameters.

        Args:
            inputs: this rank's rows, the same numbers of tokens.
            dim: of the tokens, in inputs and results.
        Returns:
            This rank's rows of what the layer returns: a tensor or a tuple of tensors.
        Raises:
            ValueError: the same on every rank, if the layout cuts a block, or inputs are no rows.
        """
        if self.reduction == "fast":
            return module(*inputs)
        from tilewise.exact.by_blocks import GradientSums, run_by_blocks

        transport = transport_for(self.group)
        assert isinstance(self._gradients, GradientSums), "made with the reduction"
        return run_by_blocks(module, inputs, self.layout, transport, self._gradients, dim)

    def sum_gradients(self, module: torch.nn.Module) -> None:
        """Give every parameter of a module the sum of all ranks' gradients, the same on all ranks.

            loss.backward()
            cp.sum_gradients(model)
            optimizer.step()

        With reduction="fast" gradients are added in the order of ranks. With "canonical" they are
        those that by_blocks kept, and their sum has the same bits at any split.

        Raises:
            ValueError: the same on every rank, if the ranks' parameters differ, or with "canonical"
                one has a gradient that by_blocks did not make.
        """
        sum_gradients(module, transport_for(self.group), self._gradients)

    # The overloads say what is returned; help() and a test know the options by name.
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        return_lse: Literal[False] = False,
        return_max_logit: Literal[False] = False,
        **options: Any,
    ) -> Tensor: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        return_lse: Literal[True],
        return_max_logit: Literal[False] = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        return_lse: bool = False,
        return_max_logit: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]: ...
    @explains_other_names
    def attention(  # noqa: PLR0913  # pyright: ignore[reportInconsistentOverload]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        plan: Plan | None = None,
        mask: Mask | Chosen | Sequence[Mask] | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        backward_plan: Plan | None = None,
        kv_layout: Layout | None = None,
        wire_dtype: torch.dtype | DtypeName | None = None,
        wire: AnyWire | None = None,
        save: Save | None = None,
        prune: bool = True,
        reduction: Reduction = "fast",
        q_positions: Sequence[int] | Tensor | None = None,
        validate: Validate = "first",
        kernel: Kernel | str | None = None,
        sink: Tensor | None = None,
        bias: Tensor | Alibi | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        return_max_logit: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """tw.attention of this rank's rows, with its keyword arguments; layout and group are set.

        Args:
            plan: instead of the strategy's, for this call, and on cp's attention_layout.
            mask: instead of the one given at the start (layers with windows among full ones).
                `tw.Chosen`: keys for each query, which that mask must show it; on cp's layout. A
                list of one for each batch entry runs on the strategy's plan, which must not be one
                that is made for a single mask.
            kernel: instead of the one given at the start.
            reduction: "canonical" for this call, where it was not asked for at the start.
        """
        chooses = isinstance(mask, Chosen)
        if chooses:
            mask = mask.kept_to(self.mask)
            plan = ring(self.world_size)  # no plan has a part in it
        elif plan is None:
            plan, chosen = self._plans(q, k, v, mask, wire)
            # What forward gathered serves its own plan alone.
            if backward_plan is None and save != "gathered":
                backward_plan = chosen
        moves = self.moves_rows and not chooses
        if moves:
            if torch.compiler.is_compiling():
                raise ValueError(
                    "attention_layout moves rows outside compiled code alone; wrap the function "
                    "that calls attention in torch.compiler.disable"
                )
            transport = transport_for(self.group)
            settled(transport, lambda: self._check_moved(plan, kv_layout))
            there = relayout_moves(self.layout, self.attention_layout)
            q, k, v = relaid(q, k, v, latent_of(wire), there, transport)
        results = attention(
            q,
            k,
            v,
            plan=plan,
            layout=self.layout if chooses else self.attention_layout,
            mask=self.mask if mask is None and not isinstance(plan, RankPlan) else mask,
            group=self.group,
            softmax_scale=softmax_scale,
            return_lse=return_lse,
            backward_plan=backward_plan,
            kv_layout=kv_layout,
            wire_dtype=wire_dtype,
            wire=wire,
            save=save,
            prune=prune,
            reduction=self.reduction if is_word(reduction, "fast") else reduction,
            q_positions=q_positions,
            validate=validate,
            kernel=self.kernel if kernel is None else kernel,
            sink=sink,
            bias=bias,
            softcap=softcap,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            return_max_logit=return_max_logit,
        )
        return self._results_back(results, return_lse) if moves else results

    def _check_moved(self, plan: Plan, kv_layout: Layout | None) -> None:
        """Refuse plans and kv_layout that need q, k and v on the layout of the tokens."""
        if kv_layout is not None or getattr(plan, "replicated_queries", False):
            what = f"{plan.name} keeps all queries on every rank"
            raise ValueError(
                f"{'kv_layout is given' if kv_layout is not None else what}, but cp moves q, k and "
                f"v to {self.attention_layout!r} together; make a ContextParallel without "
                "attention_layout for this call"
            )

    def _results_back(
        self, results: Tensor | tuple[Tensor, ...], has_lse: bool
    ) -> Tensor | tuple[Tensor, ...]:
        """out, and lse if there is one, on the layout of the tokens; the largest scores stay."""
        back = relayout_moves(self.attention_layout, self.layout), transport_for(self.group)
        if isinstance(results, Tensor):
            return move_rows(results, *back, -3)
        out, *others = results
        if has_lse:
            others[0] = move_rows(others[0], *back, -2)
        return (move_rows(out, *back, -3), *others)

    def _plans(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        mask: Mask | Sequence[Mask] | None,
        wire: AnyWire | None,
    ) -> tuple[Plan, Plan | None]:
        """Return the plans of the forward and the backward pass (None: the same plan).

        If they were made for cp.mask, and the call has another mask, plans are made for that one.
        """
        plan = self.plan(q, k, v, wire)
        if isinstance(mask, Mask) and mask != self.mask and self._for_one_mask:
            _refuse_compiling()
            return self._decided(self._workload((q, k, k if v is None else v), mask, wire), q)
        return plan, self._backward_plan

    def plan(
        self, q: Tensor, k: Tensor, v: Tensor | None = None, wire: AnyWire | None = None
    ) -> Plan:
        """The forward pass's plan; "auto" is decided here, by the shapes of the first call.

        Args:
            v: None: as wide as k, or k is a latent.
            wire: as attention takes it.
        Raises:
            RuntimeError: if a compiler traces the first call of "auto": decide before, by calling
                plan(q, k) with tensors of this shape, or pass a plan as strategy.
        """
        if self._plan is None:
            _refuse_compiling()
            if not isinstance(q, Tensor):
                return ring(self.world_size)  # attention refuses it, on all ranks alike
            try:
                work = self._workload((q, k, k if v is None else v), self.mask, wire)
            except (ValueError, IndexError, AttributeError):
                # What is wrong with q or k is attention's to say, on all ranks alike.
                return ring(self.world_size)
            self._plan, self._backward_plan = self._decided(work, q)
            self._for_one_mask = self._plan.made_for is not None
        return self._plan

    def _decided(self, work: Workload, q: Tensor) -> tuple[Plan, Plan | None]:
        """The planner's choice for both passes; None: backward runs forward's plan."""
        from tilewise.planning.search import promising  # a fixed plan needs no planner
        from tilewise.simulation.machine import Machine

        preset = "h100x8" if q.device.type == "cuda" else "cpu-gloo"
        machine = self.machine or Machine.preset(preset)
        chosen = promising(work, machine, self.world_size)
        plan, backward = chosen.plan, chosen.backward_plan
        backward_text = "" if backward is plan else f", and {backward.name} for backward,"
        simulated = f"simulated as the fastest on {machine.name}, {1e3 * chosen.seconds:.3g} ms"
        if self._plan is None:
            self._reason = f"{backward_text} by 'auto': {simulated} for both passes"
        if self.rank == 0:
            logging.getLogger("tilewise").info(
                "strategy='auto' chose %s%s for %d tokens on %d ranks: %s for both passes",
                plan.name,
                backward_text,
                work.num_tokens,
                self.world_size,
                simulated,
            )
        return plan, None if backward is plan else backward

    def _workload(
        self, tensors: tuple[Tensor, Tensor, Tensor], mask: Mask, wire: AnyWire | None
    ) -> Workload:
        q, k, v = tensors
        wires, latent = wires_of(wire), latent_of(wire)
        kv = (k.shape[-2], v.shape[-1])
        if latent is not None:
            wires, kv = wires.of_width(k.shape[-1]), (latent.num_kv_heads, latent.v_head_dim)
        return Workload(
            num_tokens=self.num_tokens,
            num_heads=q.shape[-2],
            num_kv_heads=kv[0],
            head_dim=q.shape[-1],
            v_head_dim=kv[1],
            dtype=dtype_name(operand_dtype(q, autocast_dtype(q))),
            mask=mask,
            layout=self.attention_layout,
            wire=wires,
            reduction=self.reduction,
        )


def _refuse_compiling() -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "strategy 'auto' is decided outside compiled code: call "
            "ContextParallel.plan(q, k) once before, or pass a plan as strategy"
        )


def _group_of(mesh: DeviceMesh) -> ProcessGroup:
    """The group of this process along a one-dimensional mesh."""
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or '(unnamed)'}; pass one "
            'of them, as in mesh["cp"] of init_device_mesh(..., mesh_dim_names=("dp", "cp"))'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}; make "
            "ContextParallel on the mesh's own ranks only"
        )
    return mesh.get_group()
