"""Verbs on any layout, documents, batch and argument: the unsplit numbers, or one error on all
ranks; also where the ranks' arguments differ, and where they have compared both kinds before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import examples
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw

Options = dict[str, Any]


class Verb(NamedTuple):
    """One verb with its options, on whole tensors.

    Attributes:
        sizes: of a row, beside the batch: the heads or channels of what is moved.
    """

    name: str
    layout: tw.Layout
    batch: int | None
    dtype: torch.dtype
    sizes: tuple[int, ...]
    options: Options

    @property
    def dim(self) -> int:
        """The dimension of tokens, or of pieces."""
        return 0 if self.batch is None else 1

    @property
    def kind(self) -> str:
        """Text that is equal for calls that ranks may take for the same."""
        shared, weights = operands(self)
        shapes = [[*x.shape] for x in (*shared, *weights)]
        for shape in shapes[: len(shared)]:
            shape[self.dim] = -1
        shown = {name: _shown(x) for name, x in self.options.items() if name != "decay_dims"}
        # a fill of 0 and one of 0.0 are the same number
        shown["fill"] = str(float(self.options.get("fill", 0)))
        shown["dim"] = str(self.dim)
        return f"{self.name} {self.dtype} {shapes} {sorted(shown.items())}"


def _shown(x: object) -> str:
    return x.fingerprint if isinstance(x, tw.Layout) else str(x)


def documents(draw: st.DrawFn, num_tokens: int) -> tuple[int, ...]:
    inside = draw(st.sets(st.integers(1, num_tokens), max_size=2))
    return tuple(sorted({0, *inside, num_tokens}))


def layouts(draw: st.DrawFn, n: int, num_tokens: int) -> tw.Layout:
    kind = draw(st.sampled_from(("contiguous", "zigzag", "striped", "any")))
    if kind != "any":
        return getattr(tw, kind)(num_tokens, n)
    order = draw(st.permutations(range(num_tokens)))
    edges = sorted(draw(st.lists(st.integers(0, num_tokens), min_size=n - 1, max_size=n - 1)))
    spans = pairwise([0, *edges, num_tokens])
    return tw.Layout.from_positions([sorted(order[a:b]) for a, b in spans])


def options_of(draw: st.DrawFn, name: str, layout: tw.Layout, batch: int | None) -> Options:
    num_tokens, dim = layout.num_tokens, 0 if batch is None else 1
    fills = st.sampled_from((0, 0.0, -1.5))
    options: dict[str, Options] = {
        "halo": {"left": st.integers(0, 3), "right": st.integers(0, 2), "fill": fills},
        "roll": {
            "shifts": st.integers(-num_tokens, num_tokens),
            "wrap": st.booleans(),
            "fill": fills,
        },
        "conv1d": {
            "width": st.integers(1, 3),
            "bias": st.booleans(),
            "activation": st.sampled_from((None, "silu")),
        },
        "gather": {"mask": st.sampled_from((None, tw.Causal(), tw.Window(1, 0)))},
        "relayout": {
            "to": st.builds(lambda _: layouts(draw, layout.world_size, num_tokens), fills)
        },
        "scan": {
            "matrix": st.booleans(),
            "dim": st.sampled_from((None, dim)),
            "decay_dims": st.integers(0, 2),
        },
    }
    drawn = {key: draw(values) for key, values in options[name].items()}
    if name not in ("gather", "relayout"):
        drawn["cu_seqlens"] = documents(draw, num_tokens)
    return drawn


NAMES = ("halo", "roll", "conv1d", "gather", "relayout", "scan", "scan", "scan")


@st.composite
def verbs(draw: st.DrawFn, like: Verb | None = None) -> Verb:
    """A verb, or another with some of the same arguments."""
    n = draw(st.integers(1, 4)) if like is None else like.layout.world_size
    num_tokens = draw(st.integers(1, 9)) if like is None else like.layout.num_tokens
    layout = layouts(draw, n, num_tokens) if like is None else like.layout
    name = draw(st.sampled_from(NAMES)) if like is None else like.name
    batch = draw(st.sampled_from((None, 1, 2, 3)))
    sizes = draw(st.sampled_from(((2, 2), (2, 3), (3, 2), *[()] * (name != "conv1d"))))
    dtype = draw(st.sampled_from((torch.float64, torch.float64, torch.float32)))
    options = options_of(draw, name, layout, batch)
    drawn = Verb(name, layout, batch, dtype, sizes, options)
    if like is None:
        return _one_number(drawn)
    # one to three arguments are others
    keep = draw(st.sets(st.sampled_from(("batch", "dtype", "sizes")), min_size=1))
    drawn = drawn._replace(**{field: getattr(like, field) for field in keep})
    kept = draw(st.sets(st.sampled_from(sorted(options))))
    same = {key for key in options if options[key] == like.options[key]}  # layouts by another name
    merged = {**options, **{key: like.options[key] for key in kept | same}}
    if merged.get("dim") is not None:
        merged["dim"] = drawn.dim
    return _one_number(drawn._replace(options=merged))


def _one_number(verb: Verb) -> Verb:
    """The verb, without a matrix where a state is one number."""
    is_matrix = verb.options.get("matrix") and not verb.sizes
    return verb._replace(options={**verb.options, "matrix": False}) if is_matrix else verb


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)


def operands(verb: Verb) -> tuple[list[Tensor], list[Tensor]]:
    """Whole tensors that are sharded along verb.dim, and weights that every rank has."""
    batch = () if verb.batch is None else (verb.batch,)
    num_rows, sizes, options = verb.layout.num_tokens, verb.sizes, verb.options
    if verb.name == "conv1d":
        shapes, weights = [(*batch, num_rows, sizes[0])], [(sizes[0], options["width"])]
        weights += [(sizes[0],)] * options["bias"]
    elif verb.name == "scan":
        num_rows = len(all_pieces(verb))
        ends = (sizes[0], sizes[0]) if options["matrix"] else sizes[: options["decay_dims"]]
        shapes, weights = [(*batch, num_rows, *ends), (*batch, num_rows, *sizes)], []
    else:
        shapes, weights = [(*batch, num_rows, *sizes)], []
    many = [normal(shape, verb.dtype, seed) for seed, shape in enumerate((*shapes, *weights))]
    return many[: len(shapes)], many[len(shapes) :]


def all_pieces(verb: Verb) -> list[tuple[int, int]]:
    """The pieces of all ranks, in the order of their tokens."""
    layout, n = verb.layout, verb.layout.world_size
    mine = (pieces_of(verb, rank) for rank in range(n))
    assert layout.is_partition
    return sorted(piece for of in mine for piece in of)


def pieces_of(verb: Verb, rank: int) -> list[tuple[int, int]]:
    """Runs of a rank's neighbouring tokens of one document."""
    found: list[tuple[int, int]] = []
    for t in verb.layout.rows(rank).tolist():
        if found and found[-1][1] == t and t not in verb.options["cu_seqlens"]:
            found[-1] = found[-1][0], t + 1
        else:
            found.append((t, t + 1))
    return found


def own_rows(verb: Verb, x: Tensor, rank: int) -> Tensor:
    rows = verb.layout.rows(rank).tolist()
    if verb.name == "scan":
        every = all_pieces(verb)
        rows = [every.index(piece) for piece in pieces_of(verb, rank)]
    return x.index_select(verb.dim, torch.tensor(rows, dtype=torch.int64))


def on_rank(verb: Verb, cp: tw.ContextParallel, tensors: list[Tensor]) -> Tensor:
    """This rank's result, its rows first."""
    x, *others = tensors
    options = {k: v for k, v in verb.options.items() if k not in ("width", "bias", "decay_dims")}
    if verb.name == "conv1d":
        return cp.conv1d(x, others[0], *others[1:], **options).movedim(verb.dim, 0)
    if verb.name == "scan":
        return cp.scan(x, *others, **options).movedim(verb.dim, 0)
    made = getattr(cp, verb.name)(x, dim=verb.dim, **options)
    if isinstance(made, list):
        made = torch.cat([x.narrow(verb.dim, 0, 0), *made], verb.dim)
    return made.movedim(verb.dim, 0)


def whole(verb: Verb, tensors: list[Tensor], rank: int) -> Tensor:
    """What a rank is to get, from whole tensors, its rows first."""
    x, options, layout = tensors[0].movedim(verb.dim, 0), verb.options, verb.layout
    rows = layout.rows(rank).tolist()
    edges = [*pairwise(options.get("cu_seqlens", ()))]
    document = {t: span for span in edges for t in range(*span)}
    if verb.name == "halo":
        places = [
            t if document[start][0] <= t < document[start][1] else None
            for start, stop in pieces_of(verb, rank)
            for t in range(start - options["left"], stop + options["right"])
        ]
        return _rows_at(x, places, options["fill"])
    if verb.name == "roll":
        return _rows_at(x, [_rolled(t, *document[t], options) for t in rows], options["fill"])
    if verb.name == "relayout":
        return x[options["to"].rows(rank)]
    if verb.name == "gather":
        mask = options["mask"]
        sees = range(len(x)) if mask is None else _seen(mask, rows, len(x))
        return _rows_at(x, [t if t in sees else None for t in range(len(x))], 0)
    if verb.name == "conv1d":
        return _convolved(verb, tensors)[rows]
    pieces = all_pieces(verb)
    before = _states(x, tensors[1].movedim(verb.dim, 0), pieces, edges, options["matrix"])
    return before[[pieces.index(piece) for piece in pieces_of(verb, rank)]]


def _rolled(t: int, start: int, stop: int, options: Options) -> int | None:
    source = t - options["shifts"]
    if options["wrap"]:
        return start + (source - start) % (stop - start)
    return source if start <= source < stop else None


def _rows_at(x: Tensor, places: list[int | None], fill: float) -> Tensor:
    blank = x.new_full((1, *x.shape[1:]), fill)
    return torch.cat([x[:0], *(blank if t is None else x[t : t + 1] for t in places)])


def _seen(mask: tw.Mask, rows: list[int], num_tokens: int) -> set[int]:
    table = mask.dense(torch.arange(num_tokens), torch.arange(num_tokens))
    return {t for t in range(num_tokens) for row in rows if table[row, t]}


def _convolved(verb: Verb, tensors: list[Tensor]) -> Tensor:
    x, weight, *bias = tensors
    x = x if verb.batch is not None else x[None]
    parts = []
    for start, stop in pairwise(verb.options["cu_seqlens"]):
        padded = F.pad(x[:, start:stop].mT, (weight.shape[1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], *bias, groups=len(weight)).mT)
    out = torch.cat(parts, 1)
    out = F.silu(out) if verb.options["activation"] else out
    return (out if verb.batch is not None else out[0]).movedim(verb.dim, 0)


def _states(
    decay: Tensor,
    update: Tensor,
    pieces: list[tuple[int, int]],
    edges: list[tuple[int, int]],
    matrix: bool,
) -> Tensor:
    """The state before each piece, by the recurrence itself."""
    found, state = [update[:0]], torch.zeros_like(update[:1])
    for place, (start, _) in enumerate(pieces):
        if start in {first for first, _ in edges}:
            state = torch.zeros_like(state)
        found.append(state)
        a, u = decay[place : place + 1], update[place : place + 1]
        a = a if matrix else a.reshape(*a.shape, *[1] * (u.ndim - a.ndim))
        state = (a @ state if matrix else a * state) + u
    return torch.cat(found)


def needs_dim(verb: Verb) -> bool:
    """True if the batch may be taken for the pieces of some rank, or pieces for the batch."""
    if verb.name != "scan" or verb.options["dim"] is not None:
        return False
    counts = {len(pieces_of(verb, rank)) for rank in range(verb.layout.world_size)}
    shapes = [x.shape for x in operands(verb)[0]]
    if min(map(len, shapes)) < 2 + 2 * verb.options["matrix"] or counts == {1}:
        return False
    others = {shape[1 - verb.dim] for shape in shapes}
    return len(others) == 1 and others <= counts


def results(verb: Verb, rank: int, group: Any) -> list[Tensor]:
    """This rank's result and gradients."""
    shared, weights = operands(verb)
    mine = [own_rows(verb, x, rank) for x in shared] + weights
    mine = [x.clone().requires_grad_() for x in mine]
    cp = tw.ContextParallel(group, num_tokens=verb.layout.num_tokens, layout=verb.layout)
    out = on_rank(verb, cp, mine)
    (out * normal(tuple(out.shape), verb.dtype, rank)).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in mine]
    return [out.detach(), *grads]


def check_numbers(verb: Verb, found: list[list[Tensor]]) -> None:
    """The results of all ranks, and the gradients of all, are the unsplit ones."""
    shared, weights = operands(verb)
    leaves = [x.clone().requires_grad_() for x in (*shared, *weights)]
    close = 1e-12 if verb.dtype == torch.float64 else 1e-4
    loss = torch.zeros((), dtype=verb.dtype)
    for rank, (out, *_) in enumerate(found):
        want = whole(verb, leaves, rank)
        torch.testing.assert_close(out, want.detach(), rtol=close, atol=close)
        loss = loss + (want * normal(tuple(want.shape), verb.dtype, rank)).sum()
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    for place, want in enumerate(wanted):
        for rank, (_, *grads) in enumerate(found):
            if place < len(shared):
                mine = own_rows(verb, want, rank)
                torch.testing.assert_close(grads[place], mine, rtol=close, atol=close)
        if place >= len(shared):
            total = torch.stack([grads[place] for _, *grads in found]).sum(0)
            torch.testing.assert_close(total, want, rtol=close, atol=close)


@examples(2)
@given(verbs())
def test_a_verb_gives_the_unsplit_numbers_or_asks_every_rank_for_the_dimension(verb: Verb):
    def run(rank: int, group: Any) -> list[Tensor] | str:
        try:
            return results(verb, rank, group)
        except ValueError as error:
            assert group.bytes_sent == 0
            return str(error)

    found = tw.loopback(verb.layout.world_size, run)
    if needs_dim(verb):
        (message,) = {str(x) for x in found}
        assert "pass dim=0 or dim=1" in message
    else:
        check_numbers(verb, [x for x in found if not isinstance(x, str)])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Verb, Verb, int, bool]:
    """A verb, the same with other arguments on one rank, that rank, and whether both are known."""
    usual = draw(verbs())
    other = draw(verbs(like=usual))
    return usual, other, draw(st.integers(0, usual.layout.world_size - 1)), draw(st.booleans())


@examples(4)
@given(pairs())
def test_a_verb_with_other_arguments_on_one_rank_is_refused_on_all(
    pair: tuple[Verb, Verb, int, bool],
):
    usual, other, at, known = pair
    if needs_dim(usual) or needs_dim(other):
        return
    n = usual.layout.world_size

    def run(rank: int, group: Any) -> list[Tensor] | str:
        for verb in (usual, other) if known else ():
            results(verb, rank, group)
        sent = group.bytes_sent
        try:
            made = results(other if rank == at else usual, rank, group)
            if known:  # those whose rows need no message learn of it at the next comparison
                cp = tw.ContextParallel(group, num_tokens=usual.layout.num_tokens)
                cp.mean(torch.ones(1), 1)
            return made
        except ValueError as error:
            assert known or group.bytes_sent == sent
            return str(error)

    found = tw.loopback(n, run)
    if n == 1 or usual.kind == other.kind:
        verb = other if n == 1 else usual
        check_numbers(verb, [x for x in found if not isinstance(x, str)])
    else:
        assert all(isinstance(x, str) for x in found), (usual.kind, other.kind)
        assert len({str(x) for x in found}) == 1, found
