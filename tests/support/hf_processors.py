"""TRL's trainers on tiny models for images, which get pictures and text and make batches of them by
a processor of transformers.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from support.hf_images import END, IMAGE, MERGE, SIDE, START, VIDEO

CHAT = (
    "{% for m in messages %}{{ m['role'] }} {% for x in m['content'] %}"
    "{{ image if x['type'] == 'image' else x['text'] }} {% endfor %}{% endfor %}"
)
WORDS = {  # of an image, in a text
    "gemma3": f"w{START}",
    "qwen2_5_vl": f"w{START} w{IMAGE} w{END}",
    "llava": f"w{IMAGE}",
}
IMAGES = (1, 0, 2, 1, 0, 0, 3, 1, 1, 2)  # of rows, in turn


def processor(name: str) -> Any:
    """What makes a batch of pictures and text for a model of hf_images."""
    match name:
        case "qwen2_5_vl":
            return _qwen()
        case "gemma3":
            from transformers import Gemma3Processor
            from transformers.models.gemma3.image_processing_pil_gemma3 import (
                Gemma3ImageProcessorPil,
            )

            pictures = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
            return Gemma3Processor(
                pictures, _tokenizer(), image_seq_length=4, chat_template=_chat(name)
            )
        case _:
            from transformers import LlavaProcessor
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

            return LlavaProcessor(
                CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False),
                _tokenizer(),
                patch_size=4,
                vision_feature_select_strategy="default",
                num_additional_image_tokens=1,
                image_token=f"w{IMAGE}",
                chat_template=_chat(name),
            )


def _qwen() -> Any:
    from transformers import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideos(Qwen2_5_VLProcessor):
        """Its processor of videos needs torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None

    pixels: Any = {"min_pixels": 16, "max_pixels": 256}
    pictures = Qwen2VLImageProcessorPil(
        patch_size=2, merge_size=MERGE, temporal_patch_size=2, **pixels
    )
    return WithoutVideos(pictures, _tokenizer(), None, chat_template=_chat("qwen2_5_vl"))


def _tokenizer() -> Any:
    from support.hf_trainers import tokenizer
    from transformers import PreTrainedTokenizerFast

    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    special = {f"{name}_token": word for name, word in names.items()}
    extra = {"image_token": f"w{IMAGE}", "video_token": f"w{VIDEO}"}
    extra |= {"boi_token": f"w{START}", "eoi_token": f"w{END}"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, extra_special_tokens=extra, **special
    )


def _chat(name: str) -> str:
    return CHAT.replace("image if", f"'{WORDS[name]}' if")


def _texts(count: int, seed: int) -> list[str]:
    """Words that are none of an image's."""
    make = np.random.default_rng(seed)
    rows = [make.integers(4, 40, make.integers(3, 12)) for _ in range(count)]
    return [" ".join(f"w{word}" for word in row) for row in rows]


def _pictures(counts: tuple[int, ...]) -> list[list[Any]]:
    from PIL import Image

    make, shapes = np.random.default_rng(0), ((8, 12), (8, 8), (12, 4))
    return [
        [
            Image.fromarray(make.integers(0, 255, (*shapes[at % 3], 3), dtype=np.uint8))
            for at in range(count)
        ]
        for count in counts
    ]


def sft(run: Any, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    made = processor(run.model)
    word = WORDS[run.model]
    rows = [
        _row(run.columns, word, len(images), *texts) | {"images": images}
        for images, *texts in zip(
            _pictures(IMAGES), _texts(len(IMAGES), 1), _texts(len(IMAGES), 2), strict=True
        )
    ]
    data = Dataset.from_list(rows)
    return SFTTrainer(
        model,
        SFTConfig(folder, **{"max_length": None, "remove_unused_columns": False} | given),
        train_dataset=data,
        eval_dataset=data.select(range(3)),
        processing_class=made,
    )


def _row(columns: str, word: str, images: int, asked: str, answer: str) -> dict[str, Any]:
    prompt = " ".join([*[word] * images, asked])
    match columns:
        case "text":
            return {"text": f"{prompt} {answer}"}
        case "prompt":
            return {"prompt": prompt, "completion": f" {answer}"}
        case _:
            roles = {"user": asked, "assistant": answer}
            return {"messages": [{"role": role, "content": x} for role, x in roles.items()]}


def dpo(run: Any, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    word = WORDS[run.model]
    count = len(IMAGES)
    images = [max(1, x) for x in IMAGES]
    rows = {
        "prompt": [
            " ".join([*[word] * number, text])
            for number, text in zip(images, _texts(count, 1), strict=True)
        ],
        "chosen": [f" {x}" for x in _texts(count, 2)],
        "rejected": [f" {x}" for x in _texts(count, 3)],
        "images": _pictures(tuple(images)),
    }
    return DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(folder, **{"max_length": None} | given),
        train_dataset=Dataset.from_dict(rows),
        processing_class=processor(run.model),
    )
