"""The layout of a host library, read from the positions of the tokens that each rank holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tilewise as tw
from tilewise.arguments import whole_numbers
from tilewise.compiler.row_moves import RowMoves
from tilewise.tokens.moves import gather_moves
from tilewise.tokens.rows import move_rows
from tilewise.transport.agreement import settled


def layout_of_positions(local_positions: Any, group: tw.transport.Group = None) -> tw.Layout:
    """The layout under which each rank of the group holds the tokens that it says.

        layout = layout_of_positions(position_ids_of_this_rank, cp_group)

    Every rank calls it, once for each batch that is split in another way: the ranks exchange
    their positions, and all return the same layout.

    Args:
        local_positions: [num_rows] global positions in the whole sequence of this rank's rows, in
            their order: a list, an array or a tensor of whole numbers, which travel from the
            tensor's device (NCCL needs CUDA). They do not start again in each document.
        group: what attention takes as group.
    Raises:
        ValueError: the same on every rank, if the positions of all ranks are not every token once;
            it names the first token that is missing and the first that is there twice.
    """
    transport = tw.transport.transport_for(group)
    own = settled(transport, lambda: whole_numbers("local_positions", local_positions))
    device = local_positions.device if isinstance(local_positions, torch.Tensor) else None
    n = transport.world_size
    size = torch.tensor([len(own)], device=device)
    sizes = move_rows(size, gather_moves(tw.contiguous(n, n), None), transport).tolist()
    ends = np.cumsum(sizes)
    total = int(ends[-1])

    def gathered() -> RowMoves:
        runs = [
            [tw.layouts.Run(int(end) - size, size)] for size, end in zip(sizes, ends, strict=True)
        ]
        return gather_moves(tw.Layout(total, runs, "rows by rank"), None)

    own_rows = torch.from_numpy(own).to(device)
    rows = move_rows(own_rows, settled(transport, gathered), transport).cpu().split(sizes)
    return settled(transport, lambda: tw.Layout.from_positions(rows, name="layout_of_positions"))
