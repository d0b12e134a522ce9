"""A configuration's attention is that of its layers: widths, windows and chunks by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.cli import main
from mfu_monitor.cli.audit.audit_run import AuditFacts, audit_run
from mfu_monitor.cli.audit.model_config import read_model_config
from mfu_monitor.cli.devices import find_device
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import Layers

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


def attention(folder: Path, length: int, **content: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **content}))
    return read_model_config(folder, length)


def pairs(length: int, allowed: Any) -> int:
    return sum(allowed(i, j) for i in range(length) for j in range(i + 1))


@pytest.mark.parametrize("window", [1, 3, 8, 9, 100])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_mean_keys_are_the_pairs_of_a_window_or_of_chunks(window: int, is_chunked: bool) -> None:
    length = 10

    def allowed(i: int, j: int) -> bool:
        return i // window == j // window if is_chunked else i - j < window

    layers = Layers(count=1, keys=window, is_chunked=is_chunked)
    assert layers.mean_keys(length) * length == pytest.approx(pairs(length, allowed))


def test_grouped_heads_do_not_lower_attention_and_a_head_width_of_its_own_is_used(tmp_path: Path) -> None:
    plain = attention(tmp_path, 10).attention
    assert plain.flops_per_token("palm") == 12 * 4 * 64 * 10
    assert attention(tmp_path, 10, num_key_value_heads=2).attention == plain
    assert attention(tmp_path, 10, head_dim=16).attention.flops_per_token("palm") == 2 * 12 * 4 * 64 * 10


def test_latent_attention_has_wider_queries_than_values(tmp_path: Path) -> None:
    # DeepSeek-V3: 128 heads, queries and keys 128 + 64 wide, values 128.
    mla = attention(
        tmp_path, 4096, num_hidden_layers=61, num_attention_heads=128, hidden_size=7168, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ).attention  # fmt: skip
    assert mla.flops_per_token() == pytest.approx(61 * 6 * 128 * (192 + 128) * 4097 / 2)


@pytest.mark.parametrize(
    ("content", "windowed"),
    [
        ({"sliding_window": 3}, 4),  # Mistral: all layers
        ({"sliding_window": 3, "use_sliding_window": False, "max_window_layers": 2}, 0),  # Qwen2's default
        ({"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"sliding_window": 3, "sliding_window_pattern": 2}, 2),  # Gemma 3: each second one is full
        ({"sliding_window": 3, "model_type": "gemma2"}, 2),
        ({"sliding_window": 3, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 1),
        ({"sliding_window": None}, 0),
    ],
)
def test_windows_are_those_of_the_layers_that_have_them(tmp_path: Path, content: dict[str, Any], windowed: int) -> None:
    length, per_pair = 10, 3 * 2 * 8 * (8 + 8)
    expected = windowed * pairs(length, lambda i, j: i - j < 3) + (4 - windowed) * pairs(length, lambda i, j: True)
    found = attention(tmp_path, length, **content).attention
    assert found.flops_per_token() * length == pytest.approx(per_pair * expected)


def test_layers_without_pairs_are_named_and_chunks_are_counted(tmp_path: Path) -> None:
    kinds = ["chunked_attention", "chunked_attention", "full_attention", "linear_attention"]
    config = attention(tmp_path, 10, attention_chunk_size=4, layer_types=kinds)
    expected = 2 * pairs(10, lambda i, j: i // 4 == j // 4) + pairs(10, lambda i, j: True)
    assert config.attention.flops_per_token() * 10 == pytest.approx(3 * 2 * 8 * 16 * expected)
    assert "1 layers of linear_attention" in config.notes[0]


def test_a_vision_models_language_model_is_taken_and_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlm", "vision_config": {}, "text_config": LLAMA}))
    config = read_model_config(tmp_path, 10)
    assert config.attention.flops_per_token("palm") == 12 * 4 * 64 * 10
    assert "text_config" in config.notes[0]


@pytest.mark.parametrize("content", [{"is_encoder_decoder": True}, {"num_hidden_layers": None}])
def test_what_a_configuration_does_not_describe_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="--layers"):
        attention(tmp_path, 10, **content)


def audit(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as end:
        main(["audit", "--gpu", "H100 SXM", "--json", *arguments])
    captured = capsys.readouterr()
    assert end.value.code == code, captured.err
    return json.loads(captured.out) if code == 0 else captured.err


def test_a_configuration_stands_in_for_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hidden, layers, vocabulary, inner = 512, 4, 1000, 1024
    content = {
        **LLAMA, "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "vocab_size": vocabulary, "num_key_value_heads": 8, "num_hidden_layers": layers,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    # Four projections, three of the MLP, two norms; a last norm and the output head. The embedding is looked up.
    n = layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden + hidden * vocabulary
    rate = ("--config", str(tmp_path), "--sequence-length", "2048", "--tokens-per-s", "10M")
    report = audit(capsys, *rate)
    attended = 12 * layers * hidden * 2049 / 2
    assert report["mfu_6nd"] == pytest.approx(6 * n * 10e6 / 989.4e12)
    assert report["mfu_exact"] == pytest.approx((6 * n + attended) * 10e6 / 989.4e12)
    assert "embedding tables are left out" in " ".join(report["notes"])
    given = audit(capsys, *rate, "--params", "7M")
    assert given["mfu_6nd"] == pytest.approx(6 * 7e6 * 10e6 / 989.4e12)
    assert "--config needs --sequence-length" in audit(capsys, *rate[:2], "--tokens-per-s", "10M", code=2)


def test_experts_that_a_token_does_not_pass_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hidden, inner, experts, vocabulary = 64, 128, 8, 1000
    content = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_local_experts": experts, "num_experts_per_tok": 2, "vocab_size": vocabulary,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    shared = 2 * (4 * hidden**2 + experts * hidden + 2 * hidden) + hidden + hidden * vocabulary
    n, active = (shared + 2 * k * 3 * hidden * inner for k in (experts, 2))
    assert read_model_config(tmp_path, 10).parameters() == (n, active)
    report = audit(capsys, "--config", str(tmp_path), "--sequence-length", "512", "--tokens-per-s", "100M")
    assert report["mfu_6nd"] == pytest.approx(6 * active * 100e6 / 989.4e12)


def test_windows_and_widths_may_be_given_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--layers", "4", "--heads", "8", "--head-width", "64", "--sequence-length", "4096")
    run = ("--params", "100M", "--tokens-per-s", "200k", *shape)
    windowed = audit(capsys, *run, "--window", "1024", "--window-layers", "3")
    keys = 3 * (1024 - 1024 * 1023 / 2 / 4096) + 4097 / 2
    assert windowed["flops_per_token"] == pytest.approx(6e8 + 12 * 8 * 64 * keys)
    latent = audit(capsys, *run, "--v-head-width", "32")
    assert latent["flops_per_token"] == pytest.approx(6e8 + 6 * 4 * 8 * 96 * 4097 / 2)
    for wrong in (
        ("--window", "9", "--window-layers", "5"),
        ("--window-layers", "2"),
        ("--window", "9", "--bidirectional"),
    ):
        assert "window" in audit(capsys, *run, *wrong, code=2)


def test_a_mix_of_precisions_is_held_against_what_it_allows(capsys: pytest.CaptureFixture[str]) -> None:
    # 70% of the FLOPs at 1978.9e12, 30% at 989.4e12: 1 / (0.7 / 1978.9 + 0.3 / 989.4) = 1522.2e12.
    peak = 1 / (0.7 / 1978.9e12 + 0.3 / 989.4e12)
    run = ("--params", "7B", "--tokens-per-s", "18k", "--precision", "fp8:70%,bf16:30%")
    report = audit(capsys, *run)
    assert report["peak_flops_per_s"] == pytest.approx(peak, rel=1e-4)
    assert report["mfu"] == pytest.approx(6 * 7e9 * 18e3 / peak, rel=1e-4)
    assert report["precision"] == "70% fp8, 30% bf16"
    assert report["verdict"] == "plausible"
    assert "add up to 100%" in audit(capsys, *run[:4], "--precision", "fp8:70%,bf16:20%", code=2)


def test_a_mix_that_is_impossible_is_impossible_by_its_own_limit() -> None:
    peak = find_device("H100 SXM", precision="fp8")
    facts: dict[str, Any] = {
        "peak": peak, "precision": "fp8", "parameters": 7e9, "precision_shares": {"fp8": 0.7, "bf16": 0.3},
    }  # fmt: skip
    limit = peak.weighted_flops_per_s(facts["precision_shares"])
    assert limit is not None
    assert audit_run(AuditFacts(tokens_per_s=0.5 * limit / 42e9, **facts)).verdict == "plausible"
    assert audit_run(AuditFacts(tokens_per_s=1.2 * limit / 42e9, **facts)).verdict == "impossible"
