"""The study that trains a model by every strategy: losses of the unsplit one, waits, refusals."""

from __future__ import annotations

import pytest

import tilewise as tw
from benchmarks.study import train
from tilewise_tools.lab import LabError


def test_strategies_train_the_unsplit_model(monkeypatch: pytest.MonkeyPatch):
    plans = {"ring": tw.ring(2), "ulysses": tw.ulysses(2)}
    monkeypatch.setattr(train, "RANKS", 2)
    monkeypatch.setattr(train, "strategies", lambda: plans)
    table = train._table("train", "over loopback", None, train.Sizes(num_tokens=65, steps=2))
    rows = table.as_json()["rows"]
    assert [row["strategy"] for row in rows] == ["ring", "ulysses", "unsplit"]
    for row in rows:
        assert float(row["loss, off"]) <= train.LOSS_TOLERANCE
        assert 0 <= row["waiting"] <= row["step"] and row["memory"] > 0
        assert row["over ring"] == rows[0]["step"] / row["step"]
    assert rows[0]["waiting"] > 0 == rows[2]["waiting"]
    assert len(table.figures) == 1


def test_a_wrong_loss_ends_the_study():
    found = train.Trained([1.0, 1.0], [0.0, 0.0], [5.0, 4.0], 1)
    wrong = found._replace(losses=[5.0, 4.001])
    with pytest.raises(RuntimeError, match=r"ring: its losses are 2\.5e-04 off"):
        list(train._rows({"ring": tw.ring(1)}, [[wrong, found]], train.Sizes()))


def test_without_a_lab_the_table_says_why(monkeypatch: pytest.MonkeyPatch):
    def no_lab(*_: object, **__: object) -> None:
        raise LabError("it needs root")

    monkeypatch.setattr(train, "Lab", no_lab)
    table = train._table("train-lab", "on 4 hosts", 100)
    assert not table.rows and table.about.endswith("Not run here: it needs root")
