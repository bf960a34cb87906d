"""Prediction beside measurement: load from outside is not the simulator's error."""

from dataclasses import replace

import pytest

import tilewise as tw
from benchmarks import prediction
from benchmarks.prediction import CASES, measure, runnable
from tilewise.expressions import read_plan
from tilewise_tools.calibration.measure import trials


@pytest.mark.parametrize("slowed", [1.0, 2.5])
def test_a_machine_under_load_is_calibrated_in_turns(slowed: float, monkeypatch):
    machine, case, n = tw.Machine.preset("cpu-gloo"), CASES[0], 2
    kernels = (
        replace(one, flops=tuple(tuple(x / slowed for x in row) for row in one.flops))
        for one in machine.kernels
    )
    busy = replace(machine, kernels=tuple(kernels))

    def measured(*_, **__):
        made = [(read_plan(text), case.workload()) for text in runnable(case, n)]
        made += [(one.plan, one.work) for one in trials(n, "float32")]
        for plan, work in made:
            yield ([tw.simulate(plan, work, busy).seconds],) * n

    monkeypatch.setattr(prediction, "gather_yields", measured)
    in_turns = [abs(row.error) for row in measure(machine, n, [case], 1)]
    once = [abs(row.error) for row in measure(machine, n, [case], 1, once=True)]
    assert len(in_turns) == len(runnable(case, n)) and max(in_turns) < 0.05
    assert (min(once) > 0.2) == (slowed > 1)
