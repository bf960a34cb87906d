"""Ranks that compare nothing but disagree on the wire hear of it, in bounded time."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import tilewise as tw
from multiprocess.launcher import run_processes
from tilewise.execution import torch_op

N = 3


def attend_with_another_wire(rank: int, folder: str, other: int) -> None:
    layout = tw.contiguous(24, N)
    q = torch.ones(layout.size(rank), 2, 16)
    call = {"plan": tw.ring(N), "layout": layout, "mask": tw.Full(), "validate": "never"}
    wire = None if rank == other else tw.wire.Float8(64)
    with (
        mock.patch.object(torch_op, "FIRST_ANSWER_SECONDS", 1.0),
        pytest.raises(RuntimeError) as caught,
    ):
        tw.attention(q, q, q, **call, wire=wire)
    (Path(folder) / str(rank)).write_text(str(caught.value))
    raise caught.value


@pytest.mark.parametrize("other", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_without_the_others_wire_does_not_wait_for_ever(tmp_path: Path, other: int):
    with pytest.raises(AssertionError, match="validate='never'"):
        run_processes(N, attend_with_another_wire, str(tmp_path), other)
    for rank in range(N):
        text = (tmp_path / str(rank)).read_text()
        wire = "None" if rank == other else "Float8(block=64"
        assert "validate='never'" in text and f"another wire than {wire}" in text, text
