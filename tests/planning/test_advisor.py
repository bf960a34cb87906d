"""Settings of other libraries: legal by their own code, priced as our plans, with what is lost."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tilewise as tw
from benchmarks.advice import CLUSTERS, MODELS
from tilewise.planning.advisor import LIBRARIES, DeviceSplit, advise, legal
from tilewise.planning.model_attention import ModelAttention, read_model

RANKS = (2, 4, 8, 32, 128)
NAMES = sorted({case.model for case in CLUSTERS})
LLAMA = ModelAttention(32, 8, 128)
MISTRAL = ModelAttention(32, 8, 128, windows=((4096, 1),))
H100 = tw.Machine.preset("h100x8")


def config(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def splits(library: str) -> Iterator[tuple[str, str, DeviceSplit, str]]:
    """Every setting that is said to be legal for the models of the page on these ranks."""
    for name in NAMES:
        for ranks in RANKS:
            for scheme, degree in legal(
                LIBRARIES[library], read_model(MODELS / f"{name}.json"), ranks
            ):
                multiple = scheme.multiple(ranks)
                split = DeviceSplit(ranks, degree, 128 // ranks, -(-100_001 // multiple) * multiple)
                yield name, scheme.name, split, scheme.flags(split)


def test_nothing_is_refused_that_a_scheme_of_the_page_needs_and_heads_decide_degrees():
    megatron = LIBRARIES["megatron"]
    degrees = [degree for scheme, degree in legal(megatron, LLAMA, 32) if scheme.name == "a2a+p2p"]
    assert degrees == [2, 4, 8]
    assert {scheme.name for scheme, _ in legal(megatron, MISTRAL, 8)} == {"all_gather", "a2a"}
    sinks = ModelAttention(64, 8, 64, windows=((128, 1), (None, 1)), has_sinks=True)
    assert [scheme.name for scheme, _ in legal(megatron, sinks, 8)] == ["a2a"]
    assert [scheme.name for scheme, _ in legal(LIBRARIES["accelerate"], sinks, 8)] == []
    replicated = legal(LIBRARIES["accelerate"], LLAMA, 32)  # 8 KV heads on 32 ranks
    assert "sp (Ulysses)" in [scheme.name for scheme, _ in replicated]


@pytest.mark.parametrize("ranks", (8, 32, 12))
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_gathered_shard_enters_each_node_once(library: str, ranks: int):
    """12 ranks fill no two nodes of 8: there every rank sends to every other."""
    (scheme,) = (
        scheme
        for scheme in LIBRARIES[library].schemes
        if scheme.name in ("all_gather", 'attn_backend="flex"', "cp allgather")
    )
    plan = scheme.plan(ranks, 1, H100.node_size)
    work = tw.Workload(ranks * 256, 4, 4, 64, dtype="float32", save="gathered")
    sent = [tw.simulate(plan, work, H100, prune=False).use(rank) for rank in range(ranks)]
    crossing = sum(use.bytes_by_link.get("between", 0) for rank in sent for use in rank)
    shard = 2 * 256 * 4 * 64 * 4  # of k and v forward, of dk and dv backward
    if ranks % H100.node_size:
        assert crossing == 2 * 2 * 8 * 4 * shard
    else:
        assert crossing == 2 * ranks * (ranks // H100.node_size - 1) * shard


def words(options: str) -> dict[str, list[str]]:
    """Options of a command line: the values that follow each name."""
    found: dict[str, list[str]] = {}
    for word in options.split():
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            list(found.values())[-1].append(word)
    return found


def test_accelerate_takes_every_setting_and_refuses_what_is_said_to_be_refused():
    accelerate = pytest.importorskip("accelerate")
    hooks = pytest.importorskip("accelerate.big_modeling")._attach_context_parallel_hooks
    names = {**vars(accelerate.utils), "ParallelismConfig": accelerate.ParallelismConfig}
    processes = SimpleNamespace(
        num_processes=128, multi_device=True, is_fsdp2=True, is_main_process=True
    )
    taken: set[str] = set()
    for name, scheme, split, options in splits("accelerate"):
        found = eval(options, {"__builtins__": {}}, names)
        found._validate_accelerator(processes)
        assert max(found.cp_size, found.sp_size) == split.ranks
        assert found.total_size == 128
        if found.cp_size > 1:
            assert found.cp_handler.cp_comm_strategy in scheme
            _head_tail(split)
        taken.add(f"{name}: {scheme}")
    for name in NAMES:
        fields = config(name)
        if fields.get("use_sliding_window") is False:
            fields["sliding_window"] = None  # as transformers' Qwen2Config does
        model = nn.Module()
        setattr(model, "config", SimpleNamespace(**fields))  # noqa: B010 - no parameter, no module
        if f"{name}: cp allgather" in taken:
            hooks(model)
        else:
            with pytest.raises(ValueError, match="sliding_attention"):
                hooks(model)
    assert "mistral-7b-v0.1: cp allgather" not in taken and "llama-3.1-8b: cp alltoall" in taken


def _head_tail(split: DeviceSplit) -> None:
    """Refuse lengths that torch's own head-tail balancer refuses."""
    balancers = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    )
    balancer = balancers._HeadTailLoadBalancer(split.num_tokens, split.ranks, "cpu")
    assert balancer._generate_indices().numel() == split.num_tokens


def test_megatron_core_takes_every_setting(monkeypatch: pytest.MonkeyPatch):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    configs = pytest.importorskip("megatron.core.transformer.transformer_config")
    utils = pytest.importorskip("megatron.core.utils")

    for name, scheme, split, options in splits("megatron"):
        named, model = words(options), config(name)
        (ranks,), comm = map(int, named["context-parallel-size"]), named["cp-comm-type"]
        sizes = [int(x) for x in named.get("hierarchical-context-parallel-sizes", [])] or None
        with warnings.catch_warnings(action="ignore"):
            found = configs.TransformerConfig(
                num_layers=1,
                hidden_size=model["hidden_size"],
                num_attention_heads=model["num_attention_heads"],
                num_query_groups=model["num_key_value_heads"],
                context_parallel_size=ranks,
                cp_comm_type=comm[0],
                hierarchical_context_parallel_sizes=sizes,
            )
        assert comm == [scheme] == [found.cp_comm_type]
        # Megatron-LM, validate_args: the sizes are needed for a2a+p2p and multiply to the ranks.
        assert (sizes is None) == (scheme != "a2a+p2p")
        assert sizes is None or sizes[0] * sizes[1] == ranks == split.ranks
        monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda n=ranks: n)
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 0)
        tokens = torch.arange(int(named["seq-length"][0]))[None]
        mine = utils.get_batch_on_this_cp_rank({"tokens": tokens})["tokens"]
        assert mine.numel() * ranks == tokens.numel()


def test_torchtitan_takes_every_setting():
    configs = pytest.importorskip("torchtitan.config.configs")
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims").ParallelDims
    backends = pytest.importorskip("torchtitan.models.common.config_utils").get_attention_config
    with pytest.raises(ValueError, match="sdpa is no longer supported"):
        backends("sdpa")
    for name, scheme, split, options in splits("torchtitan"):
        named = words(options)
        short = {key.partition("parallelism.")[2]: value for key, (value,) in named.items()}
        short.pop("")
        degree = int(short.pop("context_parallel_degree"))
        found = configs.ParallelismConfig(context_parallel_degree=degree, **short)
        mesh = dims.from_config(found, degree)
        assert mesh.cp == split.ranks
        assert int(named["training.seq_len"][0]) % mesh.seq_len_divisor == 0, name
        assert found.context_parallel_load_balancer == "ptrr"
        assert type(backends(scheme.split('"')[1])).__qualname__ == "FlexAttention.Config"


def test_ulysses_is_said_to_be_as_good_where_it_is_the_best_plan():
    found = advise("megatron", LLAMA, 1 << 16, H100, 8)
    assert found.setting is not None and found.setting.scheme == "a2a"
    assert found.setting.options == (
        "--context-parallel-size 8 --cp-comm-type a2a --seq-length 65536"
    )
    assert found.verdict.startswith("Your own Ulysses (a2a) is as good as anything of ours")
    assert found.setting.seconds == pytest.approx(found.best.seconds) and found.lost == ()
    assert [one.split.ranks for one in found.by_ranks] == [2, 4, 8]
    two = found.by_ranks[0]
    assert two.split.groups == 4 and two.seconds_a_sequence == two.seconds / 4


def test_windows_heads_and_padding_are_named_as_losses():
    model = ModelAttention(4, 4, 64, windows=((4096, 1),))
    found = advise("megatron", model, 32_001, H100, 8)
    assert found.setting is not None and found.setting.scheme == "all_gather"
    assert found.setting.split.num_tokens == 32_016
    assert any("15 tokens of padding" in text for text in found.lost)
    assert any("as long" in text or "longer" in text for text in found.lost)
    said = " ".join(found.refused)
    assert "p2p: no sliding windows" in said and "a2a: 8 does not divide 4:4 heads" in said
    assert found.best.seconds < found.setting.seconds and "less time" in found.verdict


def test_a_model_that_only_fewer_ranks_can_run_is_given_to_groups_of_them():
    model = ModelAttention(12, 12, 64, has_sinks=True)  # sinks: all-to-all alone
    found = advise("megatron", model, 4096, H100, 8)
    assert found.setting is not None and found.setting.split[:3] == (4, 4, 2)
    assert found.lost[0].startswith("4 of the 8 devices at most can share a sequence")
    none = advise("accelerate", ModelAttention(7, 7, 64, has_sinks=True), 4096, H100, 8)
    assert none.setting is None and "None of its settings" in none.verdict


@pytest.mark.parametrize(
    ("library", "ranks", "message"),
    [
        ("fairseq", None, r"library 'fairseq' is not known; take one of megatron, torchtitan"),
        ("megatron", 3, r"ranks \(3\) must divide the 8 devices"),
        ("megatron", 1, r"ranks \(1\) must be at least 2"),
    ],
)
def test_bad_input_is_named(library: str, ranks: int | None, message: str):
    with pytest.raises(ValueError, match=message):
        advise(library, LLAMA, 4096, H100, 8, ranks=ranks)


GOOD: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({}, ModelAttention(8, 2, 64, windows=((None, 4),))),
        ({"text_config": {**GOOD, "head_dim": 80}}, ModelAttention(8, 2, 80, windows=((None, 4),))),
        (
            {
                "layer_types": ["full_attention", *["sliding_attention"] * 3],
                "sliding_window": 99,
                "model_type": "gpt_oss",
            },
            ModelAttention(8, 2, 64, windows=((None, 1), (99, 3)), has_sinks=True),
        ),
        (
            {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24},
            ModelAttention(8, 8, 48, 24, windows=((None, 4),)),
        ),
        (
            {"sliding_window": 7, "use_sliding_window": False, "torch_dtype": "float32"},
            ModelAttention(8, 2, 64, windows=((None, 4),)),
        ),
    ],
)
def test_a_config_says_heads_widths_windows_and_sinks(
    fields: dict[str, Any], model: ModelAttention, tmp_path: Path
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, **fields}))
    assert read_model(path) == model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_attention_heads": "8"}, "num_attention_heads ('8') must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (8)"),
        ({"num_attention_heads": 6}, "hidden_size (512) must be a multiple of num_attention_heads"),
        ({"sliding_window": 9}, "sliding_window (9) stands without layer_types"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must be a list of num_hidden_layers (4)",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention; only full"),
        ({"index_topk": 64}, "index_topk means layers that are neither full nor sliding"),
        ({"per_layer_config": {"1": {"head_dim": 9}}}, "per_layer_config means layers that differ"),
        ({"model_type": "diffllama"}, "model_type (diffllama) has an attention of its own"),
    ],
)
def test_a_wrong_config_is_one_line_that_names_the_file_and_the_field(
    fields: dict[str, Any], message: str, tmp_path: Path
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, **fields}))
    with pytest.raises(ValueError) as raised:
        read_model(path)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)
