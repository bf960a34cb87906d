"""Automodel's sharder by tilewise: its layout, what it does to a batch, and what it refuses.

With NeMo Automodel on the path (a clone suffices) a model trains a step on two processes, too; its
own tests run by `python -m benchmarks.slots.automodel CLONE`.
"""

import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tilewise as tw
from tilewise.integrations import automodel


class Mesh(NamedTuple):
    """A dimension of a device mesh over the ranks of a loopback."""

    group: Any
    rank: int = 0
    count: int = 2

    def size(self) -> int:
        return self.count

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self) -> Any:
        return self.group


class Sharder:
    """What Automodel's class does with the functions that it is given."""

    def __init__(self, shard_batch: Any, local_token_global_indices: Any) -> None:
        self.shard_batch, self.indices = shard_batch, local_token_global_indices


class ShardLayout(NamedTuple):
    original_seq_len: int
    padded_seq_len: int


@pytest.fixture(autouse=True)
def their_contract(monkeypatch: pytest.MonkeyPatch):
    """The names that tilewise asks of Automodel."""
    name = "nemo_automodel.components.distributed.context_parallel.sharder"
    made = types.ModuleType(name)
    vars(made).update(ContextParallelSharder=Sharder, ShardLayout=ShardLayout)
    parts = name.split(".")
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
    monkeypatch.setitem(sys.modules, name, made)


def shard(batch: dict[str, Any], rank: int, group: Any, **options: Any) -> Any:
    mesh, lengths = Mesh(group, rank), []

    def install(num_tokens: int) -> tw.ContextParallel:
        lengths.append(num_tokens)
        layout = automodel.layout_of(mesh, num_tokens)
        return tw.ContextParallel(group, num_tokens=num_tokens, layout=layout)

    _, mine, layout = automodel.sharder(install).shard_batch(mesh, None, batch, **options)
    assert lengths == [layout.padded_seq_len]
    return mine, layout


def test_every_column_is_padded_and_cut_like_the_tokens():
    ids = torch.arange(1, 11).expand(2, -1)
    seen = torch.ones_like(ids)
    seen[1, 7:] = 0
    columns = {"input_ids": ids, "labels": ids, "attention_mask": seen, "padding_mask": seen == 0}

    def on_rank(rank: int, group: Any) -> Any:
        batch = {**columns, "name": "kept", "position_ids": torch.arange(10).expand(3, 2, -1)}
        return shard(batch, rank, group, padding_token_id=50)

    (first, layout), (second, _) = tw.loopback(2, on_rank)
    assert layout == (10, 12) and first["name"] == "kept" and "attention_mask" not in first
    assert first["input_ids"][0].tolist() == [1, 2, 3, 10, 50, 50]
    assert second["input_ids"][0].tolist() == [4, 5, 6, 7, 8, 9]
    assert first["labels"][0].tolist() == [1, 2, 3, 10, -100, -100]
    assert first["position_ids"].shape == (3, 2, 6)
    assert first["position_ids"][1, 1].tolist() == [0, 1, 2, 9, 10, 11]
    assert first["padding_mask"][1].tolist() == [False, False, False, True, True, True]
    for rank in range(2):
        indices = automodel.local_token_global_indices(Mesh(None, rank), 12)
        assert indices.tolist() == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]][rank]
    with pytest.raises(ValueError, match=r"\(10\) must be divisible by 4, 2 x cp_size"):
        automodel.local_token_global_indices(Mesh(None), 10)


LEFT = torch.tensor([[0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({"attention_mask": LEFT}, {}, r"attention_mask \[1, 4\] must be .* 0 at the end"),
        ({"qkv_format": "thd"}, {}, "qkv_format 'thd' is of the TransformerEngine backend"),
        ({"advantages": torch.ones(1, 4)}, {}, "advantages of the batch has 4 columns"),
        ({}, {"loss_mask": torch.ones(1, 4)}, "loss_mask is not supported"),
        ({"inputs_embeds": torch.ones(1, 4, 2)}, {}, r"\['input_ids', 'inputs_embeds'\]"),
    ],
)
def test_what_one_ranks_batch_has_and_cannot_be_cut_is_refused_on_all(more, options, message):
    def on_rank(rank: int, group: Any) -> Any:
        batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
        return shard({**batch, **more}, rank, group, **options)

    with pytest.raises(ValueError, match=f"rank 0: .*{message}"):
        tw.loopback(2, on_rank)


class Device(NamedTuple):
    mesh_dim_names: tuple[str, ...]

    def __getitem__(self, name: Any) -> Any:
        return Mesh(None, 0, 2)


def test_models_whose_layers_see_padding_or_carry_a_state_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 8}
    encoder = transformers.BertModel(transformers.BertConfig(**sizes))
    with pytest.raises(ValueError, match=r"BertModel cannot be split .* sees later tokens"):
        automodel.parallelize(encoder, Device(("dp", "cp")))
    with pytest.raises(ValueError, match=r"device_mesh has the dimensions \('dp',\)"):
        automodel.parallelize(encoder, Device(("dp",)))


@pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="needs NeMo Automodel")
def test_a_step_of_a_model_in_automodel_is_that_of_whole_rows(monkeypatch: pytest.MonkeyPatch):
    from benchmarks.slots.automodel import BOUND, distance

    monkeypatch.undo()
    (place,) = find_spec("nemo_automodel").submodule_search_locations or ()
    assert distance(str(Path(place).parent)) < BOUND
