"""The diffusers example: split over 4 processes, a tiny Wan trains as on one."""

import pytest
from processes.launcher import run_processes

pytest.importorskip("diffusers", reason="needs diffusers, of the extra diffusers")


def train(rank: int) -> tuple[list[float], list[float]]:
    from examples import diffusers_wan

    return diffusers_wan.main()


def test_it_trains_on_the_curve_of_one_process() -> None:
    for split, whole in run_processes(4, train):
        assert split == pytest.approx(whole, rel=1e-5)
        assert whole[0] > whole[-1]
