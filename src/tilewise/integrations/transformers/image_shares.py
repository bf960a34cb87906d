"""Assignment of a call's images to the ranks that run a model's tower on them, level by patches.

Each image goes to one rank as a whole. A video goes frame by frame, because the towers that take
videos let the patches of one frame see each other alone. The rank that has the fewest patches
gets the largest image that is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.integrations.data import OF_IMAGES

KINDS = ("image", "video")
PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
FRAMES = "num_frames_per_video"  # of Gemma 4, whose pixels are of frames
ROWS = "batch_num_images"  # of LLaVA-OneVision: images of each row; it crops those that are alone


class Images(NamedTuple):
    """The images of a call, and the frames of its videos.

    Args:
        pixels: the name of their pixels among the arguments.
        given: the tower's arguments, in which each frame is a video of its own.
        rows: rows of pixels of each image or frame.
        work: patches, or crops of equal size, of each.
        uncropped: which are given to the model as one crop, being several in a row of the batch.
        frames: of each image or video, in turn.
    """

    pixels: str
    given: dict[str, Any]
    rows: list[int]
    work: list[int]
    uncropped: list[bool]
    frames: list[int]

    def shares(self, num_ranks: int) -> list[list[int]]:
        """Assign the images to ranks by their work, the largest first to the rank that has least.

        Returns:
            for each rank the numbers of its images, in the order in which it runs them.
        """
        found, work = [list[int]() for _ in range(num_ranks)], [0] * num_ranks
        for number in sorted(range(len(self.work)), key=lambda number: -self.work[number]):
            rank = work.index(min(work))
            found[rank].append(number)
            work[rank] += self.work[number]
        return [sorted(share, key=lambda i: (self.uncropped[i], i)) for share in found]

    def some(self, share: list[int]) -> dict[str, Any]:
        """A tower's arguments for some of the images.

        Behind them may stand one that is run for nothing: the smallest one of an empty share, since
        FSDP gathers weights on every rank, and a single uncropped image once more, which alone in
        its row would be cropped.
        """
        share = share or [self.work.index(min(self.work))]
        several = [number for number in share if self.uncropped[number]]
        share = share + several if len(several) == 1 else share
        made = {
            k: x[share] if isinstance(x, Tensor) and k not in (self.pixels, ROWS) else x
            for k, x in self.given.items()
        }
        pieces = self.given[self.pixels].split(self.rows)
        made[self.pixels] = torch.cat([pieces[number] for number in share])
        if made.get(ROWS) is not None:
            together = sum(self.uncropped[number] for number in share)
            of_rows = [1] * (len(share) - together) + [together] * (together > 0)
            made[ROWS] = torch.tensor(of_rows)
        return made

    def whole_counts(self, counts: list[int]) -> list[int]:
        """Return the tokens of each image or video.

        Args:
            counts: tokens of each image or frame; the frames of a video are added up.
        """
        until = [0, *accumulate(counts)]
        return [until[b] - until[a] for a, b in pairwise([0, *accumulate(self.frames)])]


def images_of(kind: str, named: Mapping[str, Any], config: Any) -> Images | None:
    """Return the images of a tower's call, or None if its arguments do not say where each image
    ends.

    Args:
        kind: one of KINDS.
        named: the tower's arguments, of all images.
        config: of the model.
    """
    at = KINDS.index(kind)
    name, grid_name, given = PIXELS[at], GRIDS[at], {**named}
    pixels, grid, counts = given.get(name), given.get(grid_name), given.get(FRAMES)
    if not isinstance(pixels, Tensor):
        return None
    sizes, of_rows = given.get("image_sizes"), given.get(ROWS)
    uncropped = [] if of_rows is None else [n > 1 for n in of_rows.tolist() for _ in range(n)]
    frames, rows = [1] * len(pixels), [1] * len(pixels)
    if isinstance(grid, Tensor):
        frames = grid[:, 0].tolist()
        one = torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], 1)
        given[grid_name] = one.repeat_interleave(grid[:, 0], 0)
        rows = given[grid_name].prod(-1).tolist()
    elif isinstance(counts, Tensor):
        frames = counts.tolist()
        given[FRAMES] = counts.new_ones(sum(frames))
    work = rows
    if isinstance(sizes, Tensor) and hasattr(config, "image_grid_pinpoints"):
        work = [_crops(size, config) for size in sizes]
        work = [1 if is_one else n for n, is_one in zip_longest(work, uncropped)]
        if pixels.ndim == 4:  # crops of all images, one after another
            frames, rows = [1] * len(work), work
    uncropped = uncropped or [False] * len(rows)
    beside = [x for k, x in given.items() if k in OF_IMAGES and k not in (name, ROWS)]
    lists = (work, uncropped, *(x for x in beside if isinstance(x, Tensor)))
    if {len(rows), sum(frames)} != {len(x) for x in lists} or sum(rows) != len(pixels):
        return None
    return Images(name, given, rows, work, uncropped, frames)


def _crops(size: Tensor, config: Any) -> int:
    """Return the number of crops of an image, the whole image among them."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side = config.vision_config.image_size
    return image_size_to_num_patches(size, config.image_grid_pinpoints, side)
