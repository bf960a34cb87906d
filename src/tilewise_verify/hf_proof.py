"""Is a split model of transformers the unsplit one? Asked of a tiny model of its class.

A model may compute anything from its own rows that needs the whole sequence: positions, RoPE
frequencies, losses. No list of such models is ever complete, so its class is run.
"""

import copy
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from tilewise.context_parallel import ContextParallel
from tilewise.integrations.data import IGNORED, shard_inputs
from tilewise.integrations.transformers.adapters import Adapter
from tilewise.integrations.transformers.experts import ASKS
from tilewise.integrations.transformers.labels import is_masked
from tilewise.integrations.transformers.states import without_kernels
from tilewise.layouts.layout import contiguous, zigzag
from tilewise.masks.base import Causal
from tilewise.strategies.all_gather import all_gather
from tilewise.transport.loopback import loopback
from tilewise_verify.comparison import loss_difference, step_errors
from tilewise_verify.hf_shrink import NUM_TOKENS, VOCABULARY, shrunk
from tilewise_verify.records import ModelRun, Record, run_model

WORLD_SIZE = 3
WHOLE, PACKED = (0, NUM_TOKENS), (0, 6, 17, NUM_TOKENS)
TOKENS_OF_ADAPTER = 9  # from here on stand the tokens that an adapter looks for
TOLERANCE = 1e-3  # of a gradient; the same model in another order errs by some 1e-6

DECAYS = ("A_log", "recurrent_param")  # logarithms of how fast a state decays
Attach = Callable[[Any, ContextParallel, str], None]
ADVICE = "check_model(model, numerical=False) leaves this check out"
DRAWS = "It draws random numbers when it runs, beside those of dropout, and each rank draws others"
OWN_LOSS = (
    "Its rows are right: call it without labels and compute the loss from its logits, in a Trainer "
    "by compute_loss_func, or by a compute_loss of its own if labels have other names; "
    "check_model(model, loss=False) asks for this use alone"
)
OWN_HEAD = (
    ". In a Trainer put a head of your own on the model without one, with its adapters: it gets "
    "whole rows"
)
LOCK = threading.RLock()  # a proof changes the default dtype and transformers' registries


@dataclass(frozen=True)
class ModelUnderTest:
    """The model that is proven: a class with a configuration, and an adapter if it has one.

    Args:
        text: the configuration as text, by which results are kept.
        loss: whether its loss has to be right, or its first output alone.
        loss_function: what the model was given as its loss_function; None: its class's own.
        packed: whether it runs several documents in one row; unsplit each of them runs alone.
        attach: makes a model run over a ContextParallel, under a name of its own.
        adapter: of PEFT, that the model runs with.
    """

    model_class: type
    text: str
    loss: bool
    loss_function: Any
    packed: bool
    config: Any = field(compare=False)
    attach: Attach = field(compare=False)
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """The class's name, and the adapter's."""
        name = self.model_class.__name__
        return name if self.adapter is None else f"{name} with {self.adapter.name}"

    @property
    def documents(self) -> tuple[int, ...]:
        """Boundaries of the documents that it runs."""
        return PACKED if self.packed else WHOLE

    def made(self) -> Any:
        """A tiny model of the class and configuration, with the adapter."""
        return tiny_model(self.model_class, self.config, self.loss_function, self.adapter)

    def refuted(self) -> str | None:
        """Why models of this class and configuration cannot run split; None if a tiny one can.

        Documents that run alone have a loss of routers each, and packed ones have one together: so
        it is tried on one document, and packed documents are tried without it.
        """
        with LOCK, _untouched():
            text_config = self.config.get_text_config(decoder=True)
            if not (self.packed and getattr(text_config, ASKS, False)):
                return _refuted(self)
            config = copy.deepcopy(self.config)
            setattr(config.get_text_config(decoder=True), ASKS, False)
            text = config.to_json_string(use_diff=False)
            unbalanced = replace(self, config=config, text=text)
            return _refuted(replace(self, packed=False)) or _refuted(unbalanced)


@lru_cache(maxsize=64)
def _refuted(subject: ModelUnderTest) -> str | None:
    name = subject.name
    try:
        model = subject.made()
        want = _run(subject, copy.deepcopy(model), None)  # RecurrentGemma keeps states of a run
        draws = _drew()
    except Exception as error:  # whatever a model's code raises
        why = f"({type(error).__name__}: {_first_line(error)})"
        if subject.loss:
            return _without_loss(subject).refuted() or (
                f"{name}: its loss of a label for each token could not be tried {why}. {OWN_LOSS}"
            )
        return (
            f"{name}: no tiny model of its configuration could be made and run, to see whether it "
            f"can be split {why}; {ADVICE}"
        )
    found = None
    for dtype in (torch.float32, torch.float64):  # some models err by more than others
        try:
            if dtype == torch.float64:
                want = _run(subject, copy.deepcopy(model.double()), None)
            got = _split(subject, model)
        except Exception as error:  # whatever a model's code raises
            if found is not None:
                break
            return _could_not_run(name, error)
        found = _difference(want, got)
        if found is None:
            return None
    why = DRAWS if draws else _hint(subject)
    return f"{name} split over ranks is not the unsplit model: {found}. {why}"


def _drew() -> bool:
    """Return whether the run that just ended drew of torch's random numbers."""
    start = torch.Generator().manual_seed(ModelRun().seed).get_state()
    return not torch.equal(torch.default_generator.get_state(), start)


def _hint(subject: ModelUnderTest) -> str:
    if subject.loss and _without_loss(subject).refuted() is None:
        return f"Its loss is not its share of the whole one, or pools this rank's rows. {OWN_LOSS}"
    own_head = OWN_HEAD if "SequenceClassification" in subject.model_class.__name__ else ""
    return (
        "It computes from this rank's tokens what needs the whole sequence (this was a tiny model "
        f"of its class and configuration, {NUM_TOKENS} tokens on {WORLD_SIZE} ranks; {ADVICE})"
    ) + own_head


def _without_loss(subject: ModelUnderTest) -> ModelUnderTest:
    return replace(subject, loss=False)


def _could_not_run(name: str, error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error).removeprefix("rank 0: ")
    return f"{name} split over ranks raises {type(error).__name__}: {_first_line(error)}; {ADVICE}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]


def tiny_model(
    model_class: type, config: Any, loss_function: Any = None, adapter: Adapter | None = None
) -> Any:
    """A small model of a class, of random weights so large that what a token sees matters."""
    config = shrunk(config)
    config._attn_implementation = "eager"
    config.get_text_config(decoder=True).use_cache = False
    torch.default_generator.manual_seed(0)
    model: Any = model_class(config).float().train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):  # of a fixed probability, or one of an odd name
            module.p = 0.0
    if loss_function is not None:
        model.loss_function = loss_function
    if adapter is not None:
        model = adapter.put_into(model).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(DECAYS):  # so slow that a state that is lost shows
                weight.normal_(-3, 0.3)
            elif weight.ndim > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def _split(subject: ModelUnderTest, whole: Any) -> list[Record]:
    layout, causal = contiguous(NUM_TOKENS, WORLD_SIZE), Causal()
    if subject.packed:
        layout = zigzag(NUM_TOKENS, WORLD_SIZE)  # pieces between pieces of other ranks

    def on_rank(rank: int, group: Any) -> Record:
        plan = all_gather(WORLD_SIZE)
        cp = ContextParallel(
            group, num_tokens=NUM_TOKENS, mask=causal, layout=layout, strategy=plan
        )
        model = copy.deepcopy(whole)
        subject.attach(model, cp, f"tilewise_proof_{rank}")
        return _run(subject, model, cp)

    with _no_new_names():
        return loopback(WORLD_SIZE, on_rank)


def _run(subject: ModelUnderTest, model: Any, cp: ContextParallel | None) -> Record:
    """Loss and gradients; with cp this rank's share."""
    make = torch.Generator().manual_seed(1)
    vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", VOCABULARY)
    ids = torch.randint(5, vocabulary - 1, (1, NUM_TOKENS), generator=make)
    if subject.adapter is not None:
        sought = subject.adapter.tokens()[: NUM_TOKENS - TOKENS_OF_ADAPTER]
        ids[0, TOKENS_OF_ADAPTER : TOKENS_OF_ADAPTER + len(sought)] = ids.new_tensor(sought)
    parameters = inspect.signature(subject.model_class.forward).parameters.values()
    labels = None
    if subject.loss and any(x.name == "labels" or x.kind == x.VAR_KEYWORD for x in parameters):
        labels = (ids % 2).where(torch.arange(NUM_TOKENS) != 3, IGNORED)
    answers = ("start_positions", "end_positions") if subject.loss else ()
    if cp is not None:
        shift = not is_masked(subject.model_class)
        given = {"labels": labels, "cu_seqlens": subject.documents, "shift_labels": shift}
        calls = [shard_inputs(cp.layout, cp.rank, ids, **given)]
    else:
        calls = _apart(ids, labels, subject.documents)
    answer = {x.name: ids.new_tensor([4]) for x in parameters if x.name in answers}

    def loss() -> Tensor:
        total = torch.zeros(())
        for inputs, span in zip(calls, pairwise(subject.documents), strict=False):
            out = model(**inputs, **answer)
            first, *others = filter(_is_float, out.values() if isinstance(out, dict) else out)
            rows = inputs["input_ids"].shape[1]
            # A pooled output of a rank is none of the whole sequence.
            pooled = [x for x in others if subject.loss and x.shape[1:2] != (rows,)]
            for number, x in enumerate((first, *pooled)):
                make = torch.Generator().manual_seed(2 + number)
                total = total + _weighed(x, rows, span if cp is None else cp, make)
        return total

    with without_kernels(model):
        return run_model(model, loss, ModelRun())


def _apart(ids: Tensor, labels: Tensor | None, documents: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the arguments of a model for each document alone; the losses of these calls add up."""
    calls = [{"input_ids": ids[:, a:b]} for a, b in pairwise(documents)]
    if labels is None:
        return calls
    spans = list(pairwise(documents))
    count = sum(int((labels[:, a + 1 : b] != IGNORED).sum()) for a, b in spans)
    for call, (a, b) in zip(calls, spans, strict=True):
        call["labels"] = labels[:, a:b]
        if len(calls) > 1:
            call["num_items_in_batch"] = torch.tensor(count)
    return calls


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _weighed(
    out: Tensor, rows: int, mine: ContextParallel | tuple[int, int], make: torch.Generator
) -> Tensor:
    """Return a loss as it is; of any other output the sum of its numbers, each times a random
    weight.

    Args:
        rows: number of tokens in `out`.
        mine: which tokens these are: a rank's, or a span.
        make: draws the weights.
    """
    if not out.ndim:
        return out
    shape = list(out.shape)
    by_row = out.ndim > 1 and shape[1] == rows
    if by_row:
        shape[1] = NUM_TOKENS
    weights = torch.randn(shape, generator=make).to(out.dtype)
    if by_row:
        weights = weights[:, slice(*mine)] if isinstance(mine, tuple) else mine.shard(weights, 1)
    return (out * weights).sum()


def _difference(want: Record, ranks: list[Record]) -> str | None:
    tolerance = TOLERANCE * max(1.0, abs(want.loss or 0.0))
    text = loss_difference(want, ranks, tolerance)
    sizes = {name: float(x.norm()) for name, x in want.parameters.items()}
    floor = TOLERANCE * max(sizes.values(), default=0.0)
    limits = {name: TOLERANCE * max(size, floor) for name, size in sizes.items()}
    wrong = step_errors(want.parameters, [rank.parameters for rank in ranks], limits).total
    for name, error in wrong.items():
        if text is None and not error <= 1:
            off = error * limits[name]
            text = f"the gradient of {name} is off by {off:.2g}, its norm is {sizes[name]:.2g}"
    return text


@contextmanager
def _untouched() -> Iterator[None]:
    """Run on the CPU in fp32 with gradients, and leave random states and modes as they were."""
    dtype, states = torch.get_default_dtype(), (random.getstate(), np.random.get_state())
    generator = torch.default_generator.get_state()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.default_generator.set_state(generator)
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _no_new_names() -> Iterator[None]:
    """Forget what is registered meanwhile; transformers has no public way to do so."""
    from transformers import AttentionInterface, AttentionMaskInterface

    registries = [x._global_mapping for x in (AttentionInterface, AttentionMaskInterface)]
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, content in zip(registries, before, strict=True):
            for name in registry.keys() - content.keys():
                del registry[name]
