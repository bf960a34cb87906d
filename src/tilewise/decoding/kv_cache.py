"""KVCache: keys and values of growing sequences, spread over the ranks of a group."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from tilewise.arguments import DtypeName, Validate, dtype_name, is_word, of_kind, require_type
from tilewise.compiler.resolved import CallShape, resolve_passes
from tilewise.decoding.chunk import Chunk, num_held
from tilewise.decoding.shape_checks import CacheShape
from tilewise.decoding.step import DecodingPass, QuerySpan
from tilewise.execution.call import ResolvedCall, autocast_dtype, without_autocast
from tilewise.execution.sinks import check_sink, kind_of, values_of
from tilewise.execution.validation import checked_scale, checked_softcap
from tilewise.functional import attention
from tilewise.kernels.protocol import Kernel, Scores
from tilewise.kernels.registry import kernel_for, serving_kernel
from tilewise.layouts.joint import on_every_rank
from tilewise.layouts.layout import contiguous
from tilewise.masks.base import Causal, Full, Mask
from tilewise.plan.ir import Plan
from tilewise.plan.kept import RecentValues
from tilewise.strategies.tree import tree
from tilewise.transport.agreement import agree
from tilewise.transport.resolve import Group, transport_for
from tilewise.wires.wire import wires_of

Settled = TypeVar("Settled")
Fields = dict[str, Any]
_CHANGING = "lengths", "counts", "truncated to"
"""Fields that differ from call to call of a kind."""


class CheckedQueries(NamedTuple):
    """Checked queries: the tokens that they stand at, what they may see, the pass to run."""

    chunk: Chunk
    mask: Mask
    run: DecodingPass


class Storage:
    """Memory of a rank's rows of k and v: [batch, rows, num_kv_heads, width] each, taken once.

    Row i of a sequence is its token rank + i world_size.
    """

    def __init__(self, shape: CacheShape, **tensor: Any):
        self.rank, self.world_size = shape.rank, shape.world_size
        rows = shape.batch, self._held(shape.num_tokens), shape.num_kv_heads
        self.k, self.v = (
            torch.empty(*rows, width, **tensor) for width in (shape.head_dim, shape.v_head_dim)
        )

    @property
    def rows_first(self) -> tuple[Tensor, Tensor]:
        """k and v as kernels take them: [rows, batch, num_kv_heads, head_dim]."""
        return self.k.transpose(0, 1), self.v.transpose(0, 1)

    def write(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Keep this rank's tokens of a chunk that is whole on every rank: [batch, tokens, ...]."""
        for b, (start, stop) in enumerate(zip(chunk.starts, chunk.ends, strict=True)):
            rows = slice(self._held(start), self._held(stop))
            if rows.start < rows.stop:
                skipped = self.rank + rows.start * self.world_size - start
                theirs = slice(skipped, stop - start, self.world_size)
                self.k[b, rows], self.v[b, rows] = k[b, theirs], v[b, theirs]

    def write_rows(self, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Keep rows of a chunk that are this rank's already, one sequence after the other."""
        offset = 0
        for b, (start, stop) in enumerate(zip(chunk.starts, chunk.ends, strict=True)):
            rows = slice(self._held(start), self._held(stop))
            theirs = slice(offset, offset + rows.stop - rows.start)
            self.k[b, rows], self.v[b, rows] = k[theirs], v[theirs]
            offset = theirs.stop

    def packed(self, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """k and v of sequences of these lengths, one after the other: [rows, ...].

        A view of one sequence, a copy of several.
        """
        rows = [*enumerate(map(self._held, lengths))]
        parts = [[x[b, :held] for b, held in rows] for x in (self.k, self.v)]
        k, v = (x[0] if len(x) == 1 else torch.cat(x) for x in parts)
        return k, v

    def _held(self, length: int) -> int:
        return num_held(length, self.rank, self.world_size)


class KVCache:
    """Keys and values of one layer for several sequences, each of its own length.

        caches = [tw.KVCache(4096, num_kv_heads=2, head_dim=64, batch=3) for _ in model.layers]
        chunk = caches[0].chunk([512, 97, 0])                     # prefill: rows are sharded
        out = caches[i].prefill(q, k, v, chunk, plan=tw.ring(4))
        out = caches[i].decode(q, k, v)                           # decode: rows are on all ranks

    Token t of every sequence lies on rank t mod world_size, in memory taken once. All calls, the
    constructor too, are made by all ranks together, with the same arguments but a chunk's rows.
    For inference: nothing here has a gradient.

    Args:
        num_tokens: how many tokens each sequence may have, on all ranks together.
        batch: number of sequences.
        dtype, device: of q, k and v, too.
        group: what attention takes as group.
        softmax_scale: above 0; default 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(score / softcap) before the mask.
        v_head_dim: of v and out; default head_dim.
        wire_dtype: of partial results on their way; default dtype.
        validate: as attention takes it.
        kernel: what attention takes as kernel; it needs no backward pass.
    Raises:
        ValueError: here and in every method: the same on every rank, before any tensor is sent.
    """

    def __init__(  # noqa: PLR0913 - a constructor
        self,
        num_tokens: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: Group = None,
        softmax_scale: float | None = None,
        wire_dtype: torch.dtype | DtypeName | None = None,
        validate: Validate = "first",
        kernel: Kernel | str | None = None,
        softcap: float | None = None,
        v_head_dim: int | None = None,
    ):
        self.transport = transport_for(group)
        rank, world_size = self.transport.rank, self.transport.world_size
        widths = head_dim, head_dim if v_head_dim is None else v_head_dim
        shape = CacheShape(num_tokens, batch, num_kv_heads, *widths, dtype, rank, world_size)
        self.shape, self.softmax_scale, self.softcap = shape, softmax_scale, softcap
        self.validate: Validate = validate
        self.kernel = kernel
        self.wire_dtype: DtypeName = dtype_name(dtype if wire_dtype is None else wire_dtype)
        self._plan = tree(world_size)
        self._passes: RecentValues[tuple[int, int], DecodingPass] = RecentValues(8)
        self._masks: RecentValues[Mask, Mask] = RecentValues(8)

        def check() -> tuple[tuple[Kernel, Scores, Storage], Fields]:
            shape.check_sizes()
            of_kind("wire_dtype", self.wire_dtype, DtypeName)
            scores = Scores(checked_scale(softmax_scale, head_dim), checked_softcap(softcap))
            asked = torch.device(device).type, dtype, max(widths)
            if kernel is None:
                served = kernel_for(*asked, needs=scores.needs)
            else:
                served = serving_kernel(kernel, *asked, False, scores.needs)
            made = Storage(shape, dtype=dtype, device=device)
            fields = {"sizes": shape.sizes, "dtype": dtype, "wire_dtype": self.wire_dtype}
            more = {"v_head_dim": shape.v_head_dim, "softmax_scale": scores.scale}
            return (served, scores, made), {**fields, **more, "softcap": scores.softcap}

        self._kernel, self._scores, self._storage = self._agreed("KVCache", check)
        self.lengths = (0,) * batch

    def chunk(self, counts: Any) -> Chunk:
        """The next counts[b] tokens of each sequence b: which rank holds which of them.

        It says nothing to other ranks; whether the tokens fit is prefill's to say, to all alike.
        """
        counts = self.shape.one_each("counts", counts)
        return Chunk(self.lengths, counts, self.shape.world_size)

    def append(self, k: Tensor, v: Tensor, *, counts: Any = None) -> None:
        """Add tokens whose keys and values are on all ranks; each rank keeps its own.

        Args:
            k, v: [batch, tokens, num_kv_heads, head_dim].
            counts: how many of the tokens each sequence gets, the rest being padding; default all.
        """
        chunk = self._agreed("append", lambda: self._appending(k, v, counts))
        self._storage.write(chunk, k, v)
        self.lengths = chunk.ends

    def attention(
        self,
        q: Tensor,
        *,
        mask: Mask | None = None,
        counts: Any = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Attention of each sequence's latest tokens, which are cached already, to all of it.

        Args:
            q: [batch, tokens, num_heads, head_dim], the same on every rank.
            mask: of positions within a sequence, up to num_tokens; default Causal(). The cache
                keeps none: pass a layer's own in each of its calls.
            counts: how many of q's tokens each sequence has, the rest being padding; default all.
            sink: [num_heads] or [n, num_heads], as tw.attention takes it.
        Returns:
            out as q, the same bits on every rank; 0 for padding and rows that no key reaches.
        """

        def check() -> tuple[CheckedQueries, Fields]:
            tokens = self.shape.check_tokens("q", q)
            chosen = self._counts(counts, tokens)
            return self._asking(q, self.shape.latest(self.lengths, chosen), mask, sink)

        return self._attend(q, self._agreed("attention", check, True, sink), sink)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        counts: Any = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """append and attention in one, with one agreement."""

        def check() -> tuple[CheckedQueries, Fields]:
            chunk, fields = self._appending(k, v, counts)
            asked, more = self._asking(q, chunk, mask, sink)
            if q.shape[1] != k.shape[1]:
                raise ValueError(
                    f"q has {q.shape[1]} tokens and k {k.shape[1]}; pass those of the same tokens"
                )
            return asked, {**fields, **more}

        asked = self._agreed("decode", check, True, sink)
        self._storage.write(asked.chunk, k, v)
        out = self._attend(q, asked, sink)
        self.lengths = asked.chunk.ends
        return out

    def prefill(  # noqa: PLR0913 - one call says all there is to say of a chunk
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: Chunk,
        *,
        plan: Plan,
        mask: Mask | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Add a chunk, and attend with its queries to all tokens so far, the chunk's among them.

        Args:
            q, k, v: [rows, heads, head_dim], this rank's rows of the chunk: chunk.layout.shard(x,
                rank) of the sequences' new tokens one after the other.
            chunk: from the cache's chunk(), at its present lengths; one serves all layers.
            plan: any whose queries are sharded and that is made for no layout of its own.
            mask, sink: as in attention.
        Returns:
            out as q.
        """
        try:
            mask = self._known(mask)
            self.shape.check_prefill(self.lengths, chunk, (q, k, v), plan)
            self.shape.check_mask(mask)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            self._refuse(error)
        self._storage.write_rows(chunk, k, v)
        held = self._storage.packed(chunk.ends)
        with without_autocast(q, autocast_dtype(q)):  # the cache has a dtype of its own
            out = attention(
                q,
                *held,
                plan=plan,
                layout=chunk.layout,
                kv_layout=chunk.kv_layout,
                mask=chunk.mask(mask),
                group=self.transport,
                softmax_scale=self.softmax_scale,
                softcap=self.softcap,
                wire_dtype=self.wire_dtype,
                validate=self.validate,
                kernel=self.kernel,
                sink=sink,
            )
        self.lengths = chunk.ends
        return out

    def truncate(self, lengths: Any) -> None:
        """Forget each sequence's tokens from lengths[b] on; 0 makes room for another sequence."""

        def check() -> tuple[tuple[int, ...], Fields]:
            kept = self.shape.kept(self.lengths, lengths)
            return kept, {"lengths": self.lengths, "truncated to": kept}

        self.lengths = self._agreed("truncate", check)

    def stored(self) -> tuple[Tensor, Tensor]:
        """This rank's keys and values, each [rows, num_kv_heads, head_dim]: the tokens rank,
        rank + world_size, ... of one sequence after the other."""
        return self._storage.packed(self.lengths)

    def _counts(self, given: Any, num_tokens: int) -> tuple[int, ...]:
        given = (num_tokens,) * self.shape.batch if given is None else given
        return self.shape.counts(given, num_tokens)

    def _appending(self, k: Tensor, v: Tensor, counts: Any) -> tuple[Chunk, Fields]:
        """Check tokens that are to be added."""
        tokens = self.shape.check_tokens("k", k, self.shape.num_kv_heads)
        width = self.shape.v_head_dim
        if self.shape.check_tokens("v", v, self.shape.num_kv_heads, width) != tokens:
            raise ValueError(f"k has {tokens} tokens and v {v.shape[1]}; make them equal")
        chunk = self.shape.chunk(self.lengths, self._counts(counts, tokens))
        return chunk, {"lengths": chunk.starts, "counts": chunk.counts, "k": k.shape}

    def _asking(
        self, q: Tensor, chunk: Chunk, mask: Mask | None, sink: Tensor | None
    ) -> tuple[CheckedQueries, Fields]:
        """Check queries that stand at a chunk's tokens."""
        mask = self._known(mask)
        tokens = self.shape.check_tokens("q", q)
        self.shape.check_mask(mask)
        kind = kind_of(sink)
        if kind is not None:
            check_sink(kind, q.shape[2], dtype_name(q.dtype), q.device.type)
        asked = CheckedQueries(chunk, mask, self._pass(tokens, q.shape[2]))
        return asked, {
            "lengths": chunk.starts,
            "counts": chunk.counts,
            "q": q.shape,
            "mask": mask,
            "sink": kind,
        }

    def _pass(self, num_queries: int, num_heads: int) -> DecodingPass:
        """The tree's pass over so many queries: the same at every length of the cache."""

        def build() -> DecodingPass:
            shape = self.shape
            keys = contiguous(max(shape.num_tokens, num_queries), shape.world_size)
            call = CallShape(
                Full(),
                on_every_rank(range(num_queries), keys),
                num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                dtype_name(shape.dtype),
                wires_of(None, self.wire_dtype).resolved(dtype_name(shape.dtype)),
                kv_layout=keys,
                v_head_dim=shape.v_head_dim,
            )
            passes = resolve_passes(call, self._plan)
            problem = ResolvedCall(passes, self._scores, prune=False, kernel=self._kernel)
            device = self._storage.k.device
            return DecodingPass(problem, self.transport, self.shape.batch, device)

        return self._passes.get((num_queries, num_heads), build)

    def _attend(self, q: Tensor, asked: CheckedQueries, sink: Tensor | None) -> Tensor:
        chunk, mask, run = asked
        places = [QuerySpan(*place) for place in zip(chunk.starts, chunk.ends, strict=True)]
        with without_autocast(q, autocast_dtype(q)):
            return run.attend(q, self._storage.rows_first, places, mask, sink)

    def _known(self, mask: Mask | None) -> Mask:
        """Return the mask object that was used first among equal ones, with all that was derived
        from it.
        """
        mask = Causal() if mask is None else require_type(Mask, "mask", mask)
        return self._masks.get(mask, lambda: mask)

    def _agreed(
        self,
        call: str,
        check: Callable[[], tuple[Settled, Fields]],
        sends: bool = False,
        sink: Tensor | None = None,
    ) -> Settled:
        """Return what check returns, once it has passed on every rank, with the same fields.

        Args:
            sends: messages follow, by which ranks whose call is of a known kind hear what another
                one refuses; where none do, all ranks compare.
            sink: its values are compared where the kind of call is.
        """
        try:
            of_kind("validate", self.validate, Validate)
            settled, fields = check()
        except Exception as error:  # whatever it is, the other ranks must learn of it
            self._refuse(error)
        if self.validate == "never":
            agree(self.transport, {}, None, "never")
            return settled
        named = {"call": call, **{name: str(value) for name, value in fields.items()}}
        values = {name: named.pop(name) for name in _CHANGING if name in named}
        mode: Validate = self.validate if sends else "always"
        agree(self.transport, named, None, mode, values, partial(values_of, sink))
        return settled

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise what is wrong here on every rank."""
        if not is_word(self.validate, "never"):
            agree(self.transport, None, str(error), "always")
        raise error
