"""The example finds the window that its first split forgets, and nothing in its second."""

import pytest

import tilewise as tw
from examples.parity_check import forgets_the_window, is_right


@pytest.mark.slow
def test_the_forgotten_window_is_found():
    report = tw.parity(*forgets_the_window(), timeout=200)
    assert report.layer == "model.layers.0.self_attn" and report.cause == "window_ignored"
    assert tw.parity(*is_right(), timeout=200).equal
