"""Documents of a split batch, from cu_seqlens or from every rank's position ids."""

import numpy as np
import torch
from torch import Tensor

import tilewise as tw
from tilewise.masks.base import as_ints

CuSeqlens = tuple[int, ...]


PASS = "pass position_ids=cp.position_ids[None] or what hf.shard returns"


def gathered_documents(
    cp: tw.ContextParallel, position_ids: Tensor, batch: int
) -> tuple[CuSeqlens, ...]:
    """cu_seqlens of each row of a batch, from its position ids: a document starts at each 0.

    Every rank calls it; a world of ranks exchanges the position ids once.

    Args:
        position_ids: [1 or batch, num_rows], this rank's.
    Raises:
        ValueError: the same on every rank.
    """
    local = position_ids.expand(batch, -1)[:, : cp.layout.size(cp.rank)]
    whole = cp.gather(local, 1).cpu()
    if bool((whole == whole[:1]).all()):
        return (_documents_of_row(cp, whole[0]),) * batch
    return tuple(_documents_of_row(cp, row) for row in whole)


def _documents_of_row(cp: tw.ContextParallel, position_ids: Tensor) -> CuSeqlens:
    _refuse_forgotten(cp, position_ids)
    ids = position_ids.numpy()
    jumps = np.flatnonzero(np.diff(ids) != 1) + 1
    odd = jumps[ids[jumps] != 0]
    if len(odd):
        at = int(odd[0])
        raise ValueError(
            f"position_ids go from {ids[at - 1]} to {ids[at]} at token {at}, which neither goes on "
            f"nor starts a document at 0; {PASS}"
        )
    return (0, *jumps.tolist(), cp.layout.num_tokens)


def checked_documents(
    cp: tw.ContextParallel, cu_seqlens: Tensor, position_ids: Tensor
) -> str | None:
    """Return what is wrong with cu_seqlens, or with this rank's position ids beside them; else
    None.
    """
    boundaries = as_ints(cu_seqlens, "cu_seqlens")
    if (boundaries[0], boundaries[-1]) != (0, cp.layout.num_tokens):
        return (
            f"cu_seq_lens_q goes from {boundaries[0]} to {boundaries[-1]}, but must go from 0 to "
            f"{cp.layout.num_tokens}, the whole sequence's length; do not shard it"
        )
    within = tw.lengths.position_ids(boundaries)[cp.layout.rows(cp.rank)]
    got = position_ids[..., : len(within)].cpu()
    if any(torch.equal(got, x.expand_as(got)) for x in (torch.from_numpy(within), cp.position_ids)):
        return None
    return f"position_ids are not those of this rank's tokens in the documents given; {PASS}"


def _refuse_forgotten(cp: tw.ContextParallel, whole: Tensor) -> None:
    """Raise ValueError if position ids begin at 0 on every rank.

    A model that gets no position_ids counts its own rows so.

    Args:
        whole: position ids of the whole sequence, one row.
    """
    sizes = [size for size in cp.layout.sizes if size]
    counted = cp.layout.unshard([torch.arange(size) for size in cp.layout.sizes])
    if len(sizes) > 1 and torch.equal(whole, counted):
        raise ValueError(
            "position_ids start at 0 on every rank, which is what a model counts when it is given "
            f"none; {PASS}, and for documents that end where the shards do cu_seq_lens_q too"
        )
