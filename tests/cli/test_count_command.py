"""`mfu-monitor count`: exact against closed forms written from the configuration, and its cross-check."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mfu_monitor.cli import main
from mfu_monitor.cli.meta_step import count_step
from mfu_monitor.cli.models import parse_shape
from mfu_monitor.errors import ConfigurationError

pytest.importorskip("transformers")

H, I, L, V, HEADS, KV, WIDTH = 64, 96, 3, 50, 4, 2, 16  # noqa: E741
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": L,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": V,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def llama_forward(config: dict[str, Any], B: int, S: int) -> tuple[int, int]:
    """FLOPs of the linear products and of causal attention, forward, from the configuration alone."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = hidden // heads
    kv = config["num_key_value_heads"] * width
    layer = hidden * hidden * 2 + hidden * kv * 2 + 3 * hidden * config["intermediate_size"]
    linear = 2 * B * S * (config["num_hidden_layers"] * layer + hidden * config["vocab_size"])
    attention = config["num_hidden_layers"] * 2 * B * heads * (S * (S + 1) // 2) * 2 * width
    return linear, attention


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return write(tmp_path, LLAMA)


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["count", *arguments])
    assert stop.value.code == 0
    return capsys.readouterr().out


def counted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return dict(json.loads(run(capsys, *arguments, "--json")))


# --- configurations ---------------------------------------------------------------------------------------------------


def test_a_configuration_is_counted_to_the_flop(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    result = counted(capsys, llama, "--batch-size", "2", "--sequence-length", "32")
    linear, attention = llama_forward(LLAMA, 2, 32)
    assert result["model_flops"] == 3 * linear + 3 * attention
    assert result["by_phase"] == {"forward": linear + attention, "backward": 2 * (linear + attention)}
    assert result["tokens"] == 64
    assert result["flops_per_token"] == result["model_flops"] / 64
    assert not result["is_lower_bound"]


def test_forward_only_leaves_the_backward_out(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    result = counted(capsys, llama, "--sequence-length", "32", "--forward-only")
    assert result["model_flops"] == sum(llama_forward(LLAMA, 1, 32))


def test_layers_share_a_row_and_parts_add_up(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    result = counted(capsys, llama, "--sequence-length", "32")
    rows = {row["module"]: row for row in result["modules"]}
    q = rows["model.layers.*.self_attn.q_proj"]
    assert (q["count"], q["parameters"]) == (L, L * H * H)
    assert q["model_flops"] == L * 3 * 2 * 32 * H * H
    assert rows["LlamaForCausalLM"]["model_flops"] == result["model_flops"]
    assert rows["model"]["model_flops"] + rows["lm_head"]["model_flops"] == result["model_flops"]
    assert q["share"] == q["model_flops"] / result["model_flops"]


def test_expand_shows_each_layer(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    result = counted(capsys, llama, "--sequence-length", "32", "--expand", "--depth", "3")
    names = [row["module"] for row in result["modules"]]
    assert [f"model.layers.{i}" for i in range(L)] == [name for name in names if name.startswith("model.layers.")]


def test_intensity_is_flops_over_ideal_bytes(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    S, bf16 = 32, 2
    result = counted(capsys, llama, "--sequence-length", str(S), "--forward-only", "--device", "H100 SXM")
    head = next(row for row in result["modules"] if row["module"] == "lm_head")
    moved = bf16 * (S * H + H * V + S * V)
    assert head["arithmetic_intensity"] == pytest.approx(2 * S * H * V / moved)
    assert head["bound"] == "memory"  # a ridge of 295 FLOP/byte


def test_the_table_names_inputs_modules_and_bounds(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    out = run(capsys, llama, "--sequence-length", "32", "--device", "H100 SXM")
    assert "input_ids 1x32" in out
    assert "model.layers.*.mlp.up_proj x3" in out
    assert "memory" in out
    assert "FLOPs/token" in out


@pytest.mark.parametrize(
    ("config", "unit", "tokens"),
    [
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                **{k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type")},
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
            "token",
            32,
        ),
        (
            {
                "architectures": ["ViTForImageClassification"],
                "model_type": "vit",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "image_size": 32,
                "patch_size": 16,
            },
            "sample",
            1,
        ),
    ],
    ids=["mixtral", "vit"],
)
def test_other_kinds_of_models_get_their_own_inputs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], unit: str, tokens: int
) -> None:
    result = counted(capsys, write(tmp_path, config), "--sequence-length", "32")
    assert (result["per"], result[f"{unit}s"], result["unsupported_ops"]) == (unit, tokens, [])


def test_experts_count_by_the_tokens_that_reach_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    S = 32
    result = counted(capsys, write(tmp_path, config), "--sequence-length", str(S), "--forward-only")
    kv, width = KV * WIDTH, H // HEADS
    layer = 2 * S * (2 * H * H + 2 * H * kv + H * 4) + 2 * 2 * S * 3 * H * I  # the router, then two experts a token
    attention = 2 * HEADS * (S * (S + 1) // 2) * 2 * width
    assert result["model_flops"] == L * (layer + attention) + 2 * S * H * V


class _OwnMask(nn.Module):
    """Attention with a mask that the module makes itself, on the device of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-2], device=x.device)
        mask = (places[:, None] - places).abs() < 8
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_masks_without_values_are_said_to_be_counted_full_square() -> None:
    x = torch.empty(1, 2, 32, 16, device="meta")
    record = count_step(_OwnMask(), (x,), {}, training=False)
    assert record.model_flops == 2 * 2 * 2 * 32 * 32 * 16
    assert any("counted full-square, an upper bound" in note for note in record.notes)


@pytest.mark.slow
def test_llama_3_405b_is_exact_in_ten_seconds_and_two_gigabytes(tmp_path: Path) -> None:
    # https://huggingface.co/meta-llama/Llama-3.1-405B/blob/main/config.json
    config = {
        **LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    command = [sys.executable, "-c", "from mfu_monitor.cli import main; main()", "count", write(tmp_path, config)]
    out = subprocess.run([*command, "--sequence-length", "8192", "--json"], capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(out.stdout)
    assert result["parameters"] == 405_853_388_800
    assert result["model_flops"] == 3 * sum(llama_forward(config, 1, 8192)) == 20_676_348_909_453_312
    assert used.ru_maxrss * 1024 < 2e9


# --- import paths -----------------------------------------------------------------------------------------------------

MODULE = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def with_inputs():
    return mlp(), torch.zeros(5, 8)

class Example(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)
        self.example_input_array = torch.zeros(3, 8)

class ReadsValues(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 8)
        self.again = nn.ModuleList([self.head])
        self.pointwise = nn.Conv1d(8, 8, 1)
    def forward(self, x):
        x = self.pointwise(x.mT).mT
        x = self.attention(x, x, x)[0]
        return self.again[0](self.head(self.recurrent(x)[0]))

def fails():
    raise ValueError("no weights here")

def wants(width):
    return nn.Linear(width, width)

not_a_model = lambda: 3
a_number = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "count_me.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("count_me", None)
    return "count_me"


MLP = 2 * 5 * (8 * 16 + 16 * 4)


@pytest.mark.parametrize("arguments", [("mlp", "--shape", "5x8"), ("with_inputs",)])
def test_a_factory_is_counted_on_the_inputs_given(
    capsys: pytest.CaptureFixture[str], package: str, arguments: tuple[str, ...]
) -> None:
    name, *options = arguments
    result = counted(capsys, f"{package}:{name}", *options)
    assert result["model_flops"] == 3 * MLP - 2 * 5 * 8 * 16  # the input needs no gradient
    assert (result["per"], result["samples"]) == ("sample", 5)


def test_lightning_s_example_input_is_used(capsys: pytest.CaptureFixture[str], package: str) -> None:
    assert counted(capsys, f"{package}:Example", "--forward-only")["model_flops"] == 2 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("count_me:nothing",), "cannot be imported"),
        (("no_such_package:thing",), "cannot be imported"),
        (("count_me:a_number",), "a function without arguments"),
        (("count_me:not_a_model",), "expected a torch.nn.Module"),
        (("count_me:mlp",), "Give its inputs by shape"),
        (("count_me:mlp", "--shape", "5 by 8"), "2x3x224x224"),
        (("count_me:mlp", "--shape", "5x9"), "did not run on the meta device"),
        (("count_me:mlp", "--shape", "0x8"), "'0x8' is not a shape; expected sizes above zero"),
        (("count_me:fails",), r"count_me:fails\(\) failed: ValueError: no weights here.*torch.device\('meta'\)"),
        (("count_me:wants",), r"count_me:wants\(\) failed: TypeError.*called without arguments"),
        ((".",), r"holds no config.json"),
        ((".", "--shape", "5x8"), "--shape 5x8 is for a model by import path"),
        (("count_me:ReadsValues", "--shape", "5x9"), "reads a torch.bool value.*Count a real step"),
        (("no/such/config.json",), "does not exist"),
        (("count_me.py",), "is not a Hugging Face configuration"),
        (("count_me:with_inputs", "--dtype", "int3"), "expected one of bf16"),
        (("count_me:with_inputs", "--crosscheck", "--forward-only"), "compares a training step"),
    ],
)
def test_wrong_input_is_refused_on_stderr_with_what_is_expected(
    capsys: pytest.CaptureFixture[str], package: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["count", *arguments])
    streams = capsys.readouterr()
    assert stop.value.code == 2
    assert re.search(message, streams.err)
    assert streams.out == ""


def test_shapes_carry_a_dtype() -> None:
    assert parse_shape("2x128:int64").dtype is torch.int64
    assert parse_shape("2x3", nn.Linear(2, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    with pytest.raises(ConfigurationError, match="is not a shape"):
        parse_shape("2x3:no_such_dtype")


# --- cross-check ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fvcore() -> None:
    pytest.importorskip("fvcore")


@pytest.mark.usefixtures("fvcore")
def test_the_crosscheck_gives_a_reason_for_every_difference(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    S = 256
    linear, attention = llama_forward(LLAMA, 1, S)
    result = counted(capsys, llama, "--sequence-length", str(S), "--crosscheck")
    rows = {row["name"]: row for row in result["crosscheck"]}
    fvcore = rows["fvcore x 2, forward"]
    assert (fvcore["flops"], fvcore["ours"]) == (linear, linear + attention)
    assert "no formula for aten::scaled_dot_product_attention" in fvcore["reasons"][0]
    norms = (2 * L + 1) * H  # parameters that take part in no product
    assert rows["6ND, tokens"]["flops"] == 3 * linear + 6 * norms * S
    assert any("multiplies activations with each other" in reason for reason in rows["6ND, tokens"]["reasons"])
    palm = rows["PaLM 6N + 12 L H Q T, tokens"]
    assert palm["flops"] == 3 * linear + 6 * norms * S + S * 12 * L * H * S
    assert any("masked query-key pairs" in reason for reason in palm["reasons"])
    for row in rows.values():
        assert not any("no reason found" in reason for reason in row["reasons"])


@pytest.mark.usefixtures("fvcore")
def test_fvcore_times_two_agrees_where_it_has_every_formula(capsys: pytest.CaptureFixture[str], package: str) -> None:
    result = counted(capsys, f"{package}:with_inputs", "--crosscheck")
    (fvcore, six_n_d) = result["crosscheck"]
    assert (fvcore["flops"], fvcore["difference"], fvcore["reasons"]) == (MLP, 0.0, [])
    # 6ND takes a gradient for the first layer's input, and every bias for a weight
    assert six_n_d["flops"] == 6 * 5 * (8 * 16 + 16 + 16 * 4 + 4)
    assert six_n_d["reasons"]


@pytest.mark.usefixtures("fvcore")
def test_operators_that_the_tracer_sees_whole_are_reasons_too(capsys: pytest.CaptureFixture[str], package: str) -> None:
    result = counted(capsys, f"{package}:Whole", "--shape", "2x5x8", "--crosscheck")
    fvcore = result["crosscheck"][0]
    head = (
        2 * 10 * 8 * 8
    )  # of the shared layer, called twice, and of the convolution, for which it is traced with memory
    attention = 4 * head + 2 * (2 * 2 * 2 * 5 * 5 * 4)  # 2 sequences, 2 heads of 4
    recurrent = 2 * 10 * (4 * 8 * 8 + 4 * 8 * 8)
    assert (fvcore["flops"], fvcore["ours"]) == (3 * head, 3 * head + attention + recurrent)
    text = " ".join(fvcore["reasons"])
    assert f"no formula for aten::lstm ({-recurrent / fvcore['ours']:+.1%})" in text
    assert f"no formula for aten::_native_multi_head_attention ({-attention / fvcore['ours']:+.1%})" in text
    assert "no reason found" not in text


@pytest.mark.usefixtures("fvcore")
def test_the_crosscheck_prints_its_reasons(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    out = run(capsys, llama, "--sequence-length", "256", "--crosscheck")
    assert "fvcore x 2, forward: fvcore has no formula for aten::scaled_dot_product_attention (-" in out


def windowed_pairs(S: int, W: int) -> int:
    """Query-key pairs of causal attention that looks back W tokens, itself included."""
    return W * S - W * (W - 1) // 2


MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}


def test_a_sliding_window_of_the_configuration_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = counted(capsys, write(tmp_path, MISTRAL), "--sequence-length", "512")
    linear, _ = llama_forward(MISTRAL, 1, 512)
    attention = L * HEADS * windowed_pairs(512, 64) * 4 * WIDTH
    assert result["by_phase"]["forward"] == linear + attention
    assert result["model_flops"] == 3 * (linear + attention)
    assert not any("upper bound" in note for note in result["notes"])


def test_a_window_longer_than_the_sequence_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = counted(capsys, write(tmp_path, MISTRAL), "--sequence-length", "48")
    assert result["by_phase"]["forward"] == sum(llama_forward(MISTRAL, 1, 48))


def test_layers_with_and_without_a_window_are_counted_each_by_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}
    qwen |= {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": L}
    result = counted(capsys, write(tmp_path, qwen), "--sequence-length", "512")
    linear, attention = llama_forward(qwen, 1, 512)
    one_full = attention // L
    assert result["by_phase"]["forward"] == linear + one_full + (L - 1) * HEADS * windowed_pairs(512, 64) * 4 * WIDTH


def test_attention_written_out_with_a_mask_is_labelled_an_upper_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 64}
    result = counted(capsys, write(tmp_path, gemma), "--sequence-length", "256")
    assert any("upper bound" in note for note in result["notes"])


def test_the_masks_of_transformers_are_left_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers.masking_utils

    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    before = {kind: masks[kind] for kind in masks}
    counted(capsys, write(tmp_path, MISTRAL), "--sequence-length", "128")
    assert {kind: masks[kind] for kind in masks} == before
    assert not masks._local_mapping
