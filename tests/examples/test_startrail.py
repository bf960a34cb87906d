"""StarTrail's scheme as an example of a strategy: exact in both passes, and a mesh's bytes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from conformance.oracle import assert_close, dense, draw, split

import tilewise as tw
from examples.startrail import startrail


@pytest.mark.parametrize("world_size, team", [(4, 2), (8, 2), (9, 3), (3, 1)])
@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=repr)
def test_it_is_attention_in_both_passes(world_size: int, team: int, mask: tw.Mask):
    plan, layout = startrail(world_size, team), tw.zigzag(41, world_size)
    x = draw((41, 4, 8), (41, 2, 8), seed=0)
    tw.check(plan)
    assert_close(split(x, plan, layout, mask), dense(x, mask))


@pytest.mark.parametrize("world_size, team", [(8, 2), (16, 4), (64, 8)])
def test_it_sends_what_a_mesh_sends_or_one_kv_shard_more(world_size: int, team: int):
    work = tw.Workload(16 * world_size, 8, 8, 16)
    ours, mesh = (
        tw.volume(plan, work)
        for plan in (startrail(world_size, team), tw.mesh(world_size, q_tile=team))
    )
    shard = 2 * 16 * 8 * 16 * 2  # of k and v
    assert {a - b for a, b in zip(ours.forward, mesh.forward, strict=True)} == {0, shard}
    assert {a - b for a, b in zip(ours.backward, mesh.backward, strict=True)} == {0, 2 * shard}


def test_teams_that_do_not_fit_are_refused_and_the_program_runs(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"world_size \(6\) must be a multiple of team \(2\) sq"):
        startrail(6)
    path = Path(__file__).parents[2] / "examples" / "startrail.py"
    runpy.run_path(str(path), run_name="__main__")
    assert "bytes forward, startrail(8, team=2)" in capsys.readouterr().out
