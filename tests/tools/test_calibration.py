"""Calibration: every rank gets the same machine, complete, readable, and of this host's size."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes.launcher import run_processes
from typer.testing import CliRunner

import tilewise as tw
from tilewise.simulation.machine import Link, Machine
from tilewise_tools.calibration import measure
from tilewise_tools.calibration.links import SMALL, Cores, Usage
from tilewise_tools.calibration.measure import BULK, Settings, calibrate
from tilewise_tools.calibration.own_work import SharedClock, Sizes, kernel_tables
from tilewise_tools.cli import app

QUICK = Sizes((16, 64, 256), (16, 64), 2, 1 << 12)
SETTINGS = Settings(dtypes=("float32",), sizes=QUICK, name="here")


def on_rank(rank: int, settings: Settings) -> str:
    told: list[str] = []
    text = calibrate(None, settings, told.append).to_toml()
    assert told[0] == "kernels: float32, head_dim 16" and "messages" in told
    assert (told[-1] == "whole calls") == (settings.node_size is None)
    return text


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tw.Machine:
    texts = run_processes(2, on_rank, SETTINGS)
    assert texts[0] == texts[1]
    path = tmp_path_factory.mktemp("machine") / "machine.toml"
    path.write_text(texts[0])
    return tw.Machine.load(path)


def test_a_calibrated_machine_is_complete(calibrated: tw.Machine):
    assert calibrated.name == "here"
    assert [(k.head_dim, k.backward) for k in calibrated.kernels] == [
        (16, False),
        (16, True),
        (64, False),
        (64, True),
    ]
    for what in ("launch", "message", "agree", "merge"):
        assert getattr(calibrated, f"{what}_seconds") >= 0
    assert calibrated.merge_bandwidth and calibrated.pack_bandwidth and calibrated.cores
    assert calibrated.message_seconds > 0 and min(calibrated.call_seconds) > 0
    assert calibrated.inside.bandwidth > 1e6 and calibrated.inside.latency < 1


def test_a_calibrated_machine_predicts_any_number_of_ranks_of_its_host(calibrated: tw.Machine):
    work = tw.Workload(512, 4, 4, 32, "float32", mask=tw.Causal())
    times = [tw.simulate(tw.ring(n), work, calibrated).seconds for n in (2, 4, 8)]
    assert all(0 < seconds < 60 for seconds in times)
    assert tw.simulate(tw.ring(8), work, calibrated).bytes_by_link.keys() == {"inside"}


@pytest.mark.slow
def test_hosts_of_several_ranks_have_links_between_them():
    machine = run_processes(4, on_rank, SETTINGS._replace(node_size=2))[3]
    assert "node_size = 2" in machine and "One host" not in machine


def test_larger_tiles_than_are_timed_count_as_fast_as_the_nearest():
    forward, backward = kernel_tables("float32", 16, SharedClock(torch.device("cpu")), QUICK)
    for table in (forward, backward):
        assert table.flops[2][2] == table.flops[1][1]
        assert table.flops[2][1] == table.flops[1][1]
        assert min(map(min, table.flops)) > 0
    assert (forward.backward, backward.backward) == (False, True)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match=r"a group of 1 rank .* at least 2"):
        calibrate(None, SETTINGS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "1"], r"--world-size \(1\) must be from 2 to 64"),
        (
            ["--world-size", "4", "--node-size", "3"],
            r"--node-size \(3\) must divide --world-size \(4\)",
        ),
        (["-o", "/nowhere/at/all.toml"], "is no folder; make it, or write all.toml elsewhere"),
    ],
)
def test_bad_input_ends_the_command(options: list[str], message: str):
    result = CliRunner().invoke(app, ["calibrate", *options])
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


@pytest.mark.parametrize(("load", "is_said"), ((0.2, False), (10.0, True)))
def test_other_work_is_said_and_written_down(
    load: float, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    preset, path = tw.Machine.preset("cpu-gloo"), tmp_path / "machine.toml"
    command = sys.modules["tilewise_tools.cli.calibrate"]
    monkeypatch.setattr(command, "_measured", lambda *_: preset)
    result = CliRunner().invoke(app, ["calibrate", "-o", str(path)])
    assert result.exit_code == 0, result.output
    said = "Other work kept 10.0 of 2 cores busy"
    machine = command.noted(preset, command.other_work())  # as lab calibrate does
    assert (said in machine.source) is is_said
    assert (said in result.stderr, said in tw.Machine.load(path).source) == (is_said, is_said)


@pytest.mark.slow
def test_the_command_writes_a_machine_that_predicts(tmp_path: Path):
    path = tmp_path / "machine.toml"
    result = CliRunner().invoke(app, ["calibrate", "--world-size", "2", "-o", str(path)])
    assert result.exit_code == 0, result.output
    machine = tw.Machine.load(path)
    assert {kernel.dtype for kernel in machine.kernels} == {"float32", "bfloat16", "float64"}
    work = tw.Workload(1024, 4, 4, 64, "float64")
    slower = replace(machine, inside=Link(1e6, 1e-3))
    times = [tw.simulate(tw.ring(4), work, one).seconds for one in (machine, slower)]
    assert 0 < times[0] < times[1]


@pytest.mark.parametrize("bandwidth", [5e6, 2e9])
def test_messages_keep_a_link_no_longer_than_a_short_one_takes(bandwidth: float):
    """What is left of a message's processor time is the ranks' that post it."""
    link = Link(bandwidth, 1e-4)
    before = replace(Machine.preset("cpu-gloo"), inside=link, between=link, message_seconds=0.0)
    small, bulk = Usage(1e-5, 4e-5), Usage(1e-5, 4e-5 + 1e-9 * (BULK - SMALL))
    after = measure._with_messages(before, Cores(2.0, None), small, bulk)
    assert after.copy_cores == pytest.approx(1e-9 * bandwidth / 2)
    assert after.carry_seconds == pytest.approx(min(1e-4, 3e-5 / (2 * after.copy_cores)))
    assert after.inside.latency == pytest.approx(1e-4 - after.carry_seconds)
    spent = 2 * after.message_seconds + 2 * after.carry_seconds * after.copy_cores
    assert spent == pytest.approx(small.whole)  # of both ends, as measured
