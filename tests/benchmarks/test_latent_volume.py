"""The table of bytes of latents is what its command prints, and says what the page says of it."""

from pathlib import Path

from benchmarks import latent_volume


def test_the_table_is_in_the_page():
    rows = latent_volume.rows()
    page = Path(__file__).parents[2] / "docs" / "wires.md"
    assert latent_volume.table(rows) in page.read_text()
    rings = [
        row
        for row in rows
        if row.strategy.endswith("moves='kv')") and "ulysses" not in row.strategy
    ]
    assert [row.num_ranks for row in rings] == [64, 256] and all(row.ratio > 20 for row in rings)
