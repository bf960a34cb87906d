"""All patterns: the tables of docs/masks_gallery.md, and its pictures.

python benchmarks/masks.py [--seeds 1] [--json]
python benchmarks/masks.py --pictures docs/img
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tilewise.masks import ALL_NAMES
from tilewise.tools.cli.mask import MaskOptions, mask
from tilewise.tools.cli.masks import MasksOptions, masks

TOKENS, RANKS, SEED = "8192", 8, 5
MORE = (("causal", "zigzag"), ("causal", "tiled"), ("causal_document", "tiled"))


def pictures(folder: Path) -> None:
    """Every pattern under balanced, and a few under other layouts."""
    for name, layout in (*((name, "balanced") for name in ALL_NAMES), *MORE):
        path = folder / f"mask_{name}{'' if layout == 'balanced' else '_' + layout}.png"
        mask(MaskOptions(name, TOKENS, RANKS, layout, SEED, png=path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.pictures:
        pictures(options.pictures)
    else:
        masks(MasksOptions(seeds=options.seeds, as_json=options.json))


if __name__ == "__main__":
    main()
