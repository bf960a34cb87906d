"""The hybrid example: states, convolutions and attention of a split model are the unsplit one's."""

import pytest

import tilewise as tw
from examples import hybrid

T = hybrid.NUM_TOKENS


@pytest.mark.parametrize(
    "layout",
    [
        tw.zigzag(T, 4),
        tw.contiguous(T, 3),
        tw.zigzag_documents(hybrid.CU_SEQLENS, 2),
        tw.Layout.from_positions([range(5), range(40, T), range(5, 40)]),
    ],
    ids=str,
)
def test_losses_are_those_of_one_process(layout: tw.Layout):
    whole = tw.loopback(1, lambda rank, group: hybrid.train(group))[0]
    n = layout.world_size
    for losses in tw.loopback(n, lambda rank, group: hybrid.train(group, layout)):
        assert losses == pytest.approx(whole, rel=1e-9)
    assert whole[-1] < whole[0]


def test_the_script_compares_both(capsys: pytest.CaptureFixture[str]):
    hybrid.main()
    assert capsys.readouterr().out.count("split") == 2 * hybrid.STEPS
