"""Short sums: what is read is what was written, in the bytes that were announced."""

import pytest
import torch

from tilewise.kernels.short_sums import read_short, write_short
from tilewise.plan.sums import BFLOAT16, FLOAT16, FLOAT32, SumColumns

COLUMNS = [
    SumColumns((BFLOAT16, FLOAT32), (64, 1)),
    SumColumns((FLOAT16, FLOAT32), (5, 1), largest=True),
    *(
        SumColumns((form,) * 2, widths)
        for form in (FLOAT16, BFLOAT16)
        for widths in ((3, 7), (8, 5))
    ),
    SumColumns((FLOAT16,), (128,)),
]


@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_sums_are_read_as_they_were_written(columns: SumColumns):
    made = torch.Generator().manual_seed(0)
    shape = 70, 2, 3

    def integers(bits: int, count: int) -> torch.Tensor:
        ends = -(1 << (bits - 1)), 1 << (bits - 1)
        found = torch.randint(*ends, (*shape, count), generator=made).int()
        found[0], found[1] = ends[0], ends[1] - 1
        return found

    sums = integers(32, columns.num_columns)
    for group in columns.groups:
        count = group.form.digits * group.width
        own = integers(group.form.sum_bits, count)
        sums[..., group.start : group.start + count] = own
    size = columns.row_bytes(columns.num_columns, columns.dtype)
    assert size % 4 == 0
    rows = torch.zeros(*shape, size, dtype=torch.uint8)
    write_short(sums, columns, rows)
    assert torch.equal(read_short(rows, columns, torch.empty_like(sums)), sums)


def test_a_number_of_half_precision_takes_5_bytes_or_5_and_a_half():
    for form, num_bytes in ((BFLOAT16, 5), (FLOAT16, 5.5)):
        columns = SumColumns((form,), (64,))
        assert columns.row_bytes(columns.num_columns, columns.dtype) == 64 * num_bytes + 4
