"""Trainers of transformers and TRL on tiny models, run with rows split over ranks and not split.

run = Run("sft", model="gemma3", args={"packing": True})
(want,) = run_processes(1, train, 1, {"a": run}, folder)
ranks = run_processes(2, train, 2, {"a": run.split(2)}, folder)
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from support import hf_images, hf_processors, hybrid_models, liger_stub, rollouts
from support.hf_models import VOCABULARY, build
from torch import Tensor

STEPS = 5
SAVES = {"save_strategy": "steps", "save_steps": 3}


@dataclass(frozen=True)
class Run:
    """A Trainer's run.

    Args:
        trainer: one of MAKERS.
        model: of hf_models or of hybrid_models, or of hf_images for "images" and what is on images.
        args: fields of its arguments, beside those of every run.
        columns: of SFT's data: "text", "messages", "prompt" (with completions) or "input_ids".
        sizes: of the ParallelismConfig; none: nothing is split.
        metrics: evaluate with compute_metrics.
        reduced: a name in REDUCED, of what it gets in place of logits; empty: logits.
        own_loss: a compute_loss_func.
        masked: the collator draws which tokens are masked.
        evaluates_first: before it trains.
        shared: tokens that the rollouts of a prompt have in common.
        uneven: between steps ranks but the first draw random numbers of their own.
    """

    trainer: str
    model: str = "llama"
    args: Mapping[str, Any] = field(default_factory=dict)
    columns: str = "text"
    lora: bool = False
    prompt_tuning: bool = False
    iterable: bool = False
    metrics: bool = False
    reduced: str = ""
    own_loss: bool = False
    masked: bool = False
    evaluates_first: bool = False
    uneven: bool = False
    shared: int = 6
    changes: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def split(self, cp_size: int, **sizes: int) -> Run:
        return replace(self, sizes={"cp_size": cp_size, **sizes})


def train(rank: int, world_size: int, runs: Mapping[str, Run], folder: str) -> dict[str, dict]:
    """What each run gives on this rank; a ValueError's text where it raises one."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: it is joined
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(address | ranks | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"})
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore  # data loaders fork
    liger_stub.provide()
    return {name: _run(run, folder) for name, run in runs.items()}


def _run(run: Run, folder: str) -> dict[str, Any]:
    try:
        trainer = _trainer(run, folder)
        for callback in list(trainer.callback_handler.callbacks):
            if "Printer" in type(callback).__name__:
                trainer.remove_callback(callback)
        if run.uneven:
            trainer.add_callback(_uneven())
        if run.evaluates_first:
            trainer.evaluate()
        trainer.train()
        evaluated = trainer.evaluate() if trainer.eval_dataset is not None else {}
    except ValueError as error:
        return {"error": str(error)}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "loss": [log["loss"] for log in logs],
        "grad_norm": [log["grad_norm"] for log in logs],
        "logged": _numbers(logs[-1]),
        "evaluated": _numbers(evaluated),
        "parameters": {
            name.replace("_orig_mod.", ""): x.detach().clone().float()
            for name, x in model.named_parameters()
            if x.requires_grad
        },
        "batch": trainer.get_total_train_batch_size(trainer.args),
    }


def _uneven() -> Any:
    from transformers import TrainerCallback

    class Uneven(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.rand(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)

    return Uneven()


def use_fsdp2(state_dict_type: str) -> None:
    """Let an Accelerator of this process take FSDP2, on the CPU too."""
    from types import SimpleNamespace

    from accelerate import state
    from accelerate.utils import DistributedType

    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_STATE_DICT_TYPE=state_dict_type,
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    )
    kinds: Any = SimpleNamespace(**DistributedType.__members__)
    kinds.MULTI_HPU = DistributedType.MULTI_CPU  # in the list of devices on which FSDP runs
    state.DistributedType = kinds


def resume(
    rank: int, world_size: int, run: Run, folder: str, state_dict_type: str | None = None
) -> dict[str, Any]:
    """A run, and one that goes on from its checkpoint of step 3: their parameters.

    Args:
        state_dict_type: of FSDP2; None: DDP.
    """
    train(rank, world_size, {}, folder)
    if state_dict_type is not None:
        use_fsdp2(state_dict_type)
    found = {}
    for name, checkpoint in (("whole", None), ("resumed", f"{folder}/checkpoint-3")):
        trainer = _trainer(replace(run, args={**run.args, **SAVES}), folder)
        trainer.train(resume_from_checkpoint=checkpoint)
        model = trainer.accelerator.unwrap_model(trainer.model)
        found[name] = {k: _whole(x).detach().clone() for k, x in model.named_parameters()}
    return found


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _numbers(log: Mapping[str, Any]) -> dict[str, float]:
    timed = ("runtime", "per_second", "time", "perf/")
    return {k: v for k, v in log.items() if isinstance(v, float) and not any(t in k for t in timed)}


def _trainer(run: Run, folder: str) -> Any:
    given: dict[str, Any] = {
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    given |= {"max_steps": STEPS, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    given |= {"bf16": False, "seed": 3, "lr_scheduler_type": "constant"}
    given |= {"per_device_train_batch_size": 2, **run.args}
    if run.sizes:
        from tilewise.integrations.accelerate import ParallelismConfig

        sizes: Any = run.sizes
        given["parallelism_config"] = ParallelismConfig(**sizes)
    hybrid = run.model in hybrid_models.CONFIGS
    make = hybrid_models.build if hybrid else build
    make = hf_images.build if "images" in run.trainer else make
    model = make(run.model, **run.changes)
    return MAKERS[run.trainer](run, model, folder, given)


def _plain(run: Run, model: Any, folder: str, given: Any) -> Any:
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    data: Any = [{"input_ids": tokenizer()(text)["input_ids"]} for text in texts()]
    counted = _of_best if run.reduced else _accuracy
    measured: dict[str, Any] = {"compute_metrics": counted} if run.metrics else {}
    measured |= {"preprocess_logits_for_metrics": REDUCED[run.reduced]} if run.reduced else {}
    measured |= {"compute_loss_func": _doubled} if run.own_loss else {}
    return Trainer(
        model,
        TrainingArguments(folder, **given),
        train_dataset=data,
        eval_dataset=data[:7],
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=run.masked),
        **measured,
    )


def _images(run: Run, model: Any, folder: str, given: Any) -> Any:
    """Rows of no, one or several images."""
    from transformers import Trainer, TrainingArguments

    rows = [
        hf_images.batch(model, [n], seed=i) for i, n in enumerate((0, 2, 0, 1, 5, 1, 3, 0, 2, 0))
    ]
    return Trainer(
        model,
        TrainingArguments(folder, **given, remove_unused_columns=False),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        eval_dataset=rows[:3],  # pyright: ignore[reportArgumentType]
        data_collator=hf_images.merged,
    )


def _doubled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Twice the usual loss, of whole logits and labels that are not shifted."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return 2 * loss / ((wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def _accuracy(prediction: Any) -> dict[str, float]:
    at, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    logits = prediction.predictions[labels_of(prediction)]
    return {"accuracy": float((at == labels)[labels != -100].mean()), "logit": float(logits.mean())}


REDUCED = {  # in place of logits: by token, and with labels
    "argmax": lambda logits, labels: logits.argmax(-1),
    "right": lambda logits, labels: logits.argmax(-1).where(labels != -100, -100),
}


def _of_best(prediction: Any) -> dict[str, float]:
    """How many are right, and a sum in which the prediction of each token counts."""
    best, labels = prediction.predictions, prediction.label_ids
    places = 1.0 + np.arange(best.size).reshape(best.shape) % 7
    right = (best[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100]
    return {"accuracy": float(right.mean()), "sum": float((best * places)[labels != -100].sum())}


def labels_of(prediction: Any) -> Any:
    """The places of logits that predict a label."""
    counted = np.zeros(prediction.label_ids.shape, bool)
    counted[:, :-1] = prediction.label_ids[:, 1:] != -100
    return counted


def _sft(run: Run, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    made: dict[str, list] = {
        "text": [{"text": x} for x in texts()],
        "prompt": [
            {"prompt": a, "completion": b} for a, b in zip(texts(), texts(seed=5), strict=True)
        ],
        "messages": [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in zip(texts(), texts(seed=5), strict=True)
        ],
        "input_ids": [{"input_ids": tokenizer()(x)["input_ids"]} for x in texts()],
    }
    data: Any = Dataset.from_list(made[run.columns])
    return SFTTrainer(
        model,
        SFTConfig(folder, **{"max_length": 64} | given),
        train_dataset=data.to_iterable_dataset() if run.iterable else data,
        eval_dataset=None if run.iterable else data.select(range(7)),
        processing_class=tokenizer(),
        peft_config=_adapters(run),
    )


def _adapters(run: Run) -> Any:
    import peft

    if run.lora:
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if run.prompt_tuning:
        return peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    return None


def _dpo(run: Run, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    columns = {"prompt": texts(seed=1), "chosen": texts(seed=2), "rejected": texts(seed=3)}
    return DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(folder, **{"max_length": 64} | given),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
    )


def _kto(run: Run, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    columns = {"prompt": texts(seed=1), "completion": texts(seed=2), "label": [True, False] * 20}
    return KTOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=KTOConfig(folder, **{"max_length": 64, **given, "per_device_train_batch_size": 4}),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
    )


def _orpo(run: Run, model: Any, folder: str, given: Any) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return _with_pairs(ORPOTrainer, ORPOConfig, model, folder, given)


def _cpo(run: Run, model: Any, folder: str, given: Any) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return _with_pairs(CPOTrainer, CPOConfig, model, folder, given)


def _with_pairs(trainer: Any, config: Any, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset

    columns = {"prompt": texts(seed=1), "chosen": texts(seed=2), "rejected": texts(seed=3)}
    return trainer(
        model,
        args=config(folder, **{"max_length": 64} | given),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
    )


def _gkd(run: Run, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    torch.manual_seed(11)
    teacher = type(model)(copy.deepcopy(model.config))
    data = Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in zip(texts(), texts(seed=5), strict=True)
        ]
    )
    return GKDTrainer(
        model,
        teacher_model=teacher,
        args=GKDConfig(folder, **{"max_length": 64, "max_new_tokens": 8} | given),
        train_dataset=data,
        processing_class=tokenizer(),
    )


def _reward(run: Run, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    torch.manual_seed(7)
    model.config.num_labels = 1
    head = AutoModelForSequenceClassification.from_config(model.config)
    head.base_model.load_state_dict(model.base_model.state_dict())
    data = Dataset.from_dict({"chosen": texts(seed=2), "rejected": texts(seed=3)})
    return RewardTrainer(
        head,
        RewardConfig(folder, **{"max_length": 64} | given),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        processing_class=tokenizer(),
    )


def _grpo(run: Run, model: Any, folder: str, given: Any) -> Any:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    return _with_rewards(GRPOTrainer, GRPOConfig, run, model, folder, given)


def _rloo(run: Run, model: Any, folder: str, given: Any) -> Any:
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer

    return _with_rewards(RLOOTrainer, RLOOConfig, run, model, folder, given | {"beta": 0.0})


def _with_rewards(trainer: Any, config: Any, run: Run, model: Any, folder: str, given: Any) -> Any:
    from datasets import Dataset

    sizes = {"max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 4}
    return trainer(
        model,
        reward_funcs=_distinct,
        args=config(folder, **given | sizes | dict(run.args)),
        train_dataset=Dataset.from_dict({"prompt": texts(longest=8)}),
        processing_class=tokenizer(),
        peft_config=_adapters(run),
    )


def _async_grpo(run: Run, model: Any, folder: str, given: Any) -> Any:
    given = {
        k: x for k, x in given.items() if run.args.get(k) or k != "per_device_train_batch_size"
    }
    return rollouts.async_grpo(model, folder, tokenizer(), given, run.shared, bool(run.sizes))


def _distinct(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many words are distinct, and a little for their numbers."""
    numbers = [[int(word[1:]) for word in x.split() if word.startswith("w")] for x in completions]
    return [len(set(x)) + 0.002 * sum(x) for x in numbers]


MAKERS: dict[str, Callable[..., Any]] = {
    "trainer": _plain,
    "images": _images,
    "sft on images": hf_processors.sft,
    "dpo on images": hf_processors.dpo,
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "orpo": _orpo,
    "cpo": _cpo,
    "gkd": _gkd,
    "reward": _reward,
    "grpo": _grpo,
    "rloo": _rloo,
    "async_grpo": _async_grpo,
}
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def tokenizer() -> Any:
    """Words w4 to w49 of the tiny models' vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ("<pad>", "<s>", "</s>", "<unk>")
    words = dict(zip(names, range(4), strict=True))
    words |= {f"w{number}": number for number in range(4, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    fields = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    special = dict(zip(fields, (*names, "<unk>"), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT, **special)


def texts(count: int = 40, longest: int = 30, seed: int = 1) -> list[str]:
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=make).tolist()
    words = [torch.randint(4, VOCABULARY, (n,), generator=make).tolist() for n in lengths]
    return [" ".join(f"w{word}" for word in text) for text in words]


def largest_difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)
