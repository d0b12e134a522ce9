"""Logs as other tools write them, and what becomes of them on their way to a reader: each gives what was meant."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.logs import Log, Overrides, read_log

LLM_C = "step   {i}/74 | loss 3.9{i} (+nanz)| norm 1.2 (+nanz)| lr 3.00e-04 | 50.64 ms | {mfu}% bf16 MFU | 81909 tok/s"
NANOGPT = "iter {i}0: loss 7.9{i}00, time 250.2{i}ms, mfu {mfu}%"
NANOCHAT = (
    "step 0000{i}/21400 (0.02%) | loss: 8.89 | lrm: 1.00 | dt: 989.40ms | tok/sec: 529,804 | mfu: 74.14 | "
    "total time: 0.0{i}m"
)
MEGATRON = (
    " [2024-04-06 03:0{i}:12] iteration       6{i}/     100 | consumed samples:         7680 | elapsed time per "
    "iteration (ms): 5480.9 | throughput per GPU (TFLOP/s/GPU): 238.3 | learning rate: 1.4E-05 | global batch size:   "
    "128 | lm loss: 1.8E+00 | loss scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
TITAN = (
    "[titan] 2026-02-24 19:48:4{i},690 - root - INFO - step:  {i}  loss:  4.06  grad_norm:  8.06  memory: "
    "66.91GiB(37.51%)  tps: 9,997  tflops: 312.25  mfu: 13.91%"
)
MAXTEXT = "completed step: {i}, seconds: 1.340, TFLOP/s/device: 257.90, Tokens/s/device: 36653.20, loss: 0.000"
OLMO = (
    "2025-01-01 00:00:0{i}\thost:0\tINFO\t[step={i}/1000,epoch=1]\n    throughput/device/TPS=46,001\n"
    "    throughput/device/MFU=40.1"
)
GPT_NEOX = (
    "[2023-01-01 10:00:0{i},000] [INFO] samples/sec: 24.7 | iteration {i}0/ 320000 | elapsed time per iteration (ms): "
    "1296.2 | learning rate: 1.9E-06 | approx flops per GPU: 25.0TFLOPS | lm_loss: 1.09E+01"
)
FAIRSEQ = '2021-01-01 00:00:0{i} | INFO | train_inner | {{"epoch": 1, "wps": "30123.5", "num_updates": "{i}"}}'
PRINTED = "{{'train_runtime': 200.0, 'train_samples_per_second': 160.0, 'train_steps_per_second': 0.5, 'epoch': {i}.0}}"


def lines(pattern: str, **values: str) -> str:
    return "".join(pattern.format(i=i, **values) + "\n" for i in range(1, 7))


def read(tmp_path: Path, text: str | bytes, name: str = "run.log", overrides: Overrides | None = None) -> Log:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(path, overrides)


def seen(log: Log, quantity: str) -> tuple[Any, str]:
    column = log.column(quantity)
    assert column is not None, log
    return column.median, column.scope


CONSOLES = {
    "llm.c": (lines(LLM_C, mfu="38.3"), "step_s", 0.05064, ""),
    "llm.c, MFU": (lines(LLM_C, mfu="38.3"), "mfu", 0.383, ""),
    "llm.c, tok/s": (lines(LLM_C, mfu="-100.0"), "tokens_per_s", 81909, "world"),
    "nanoGPT": (lines(NANOGPT, mfu="44.85"), "mfu", 0.4485, ""),
    "nanochat": (lines(NANOCHAT), "mfu", 0.7414, ""),
    "nanochat, tok/sec": (lines(NANOCHAT), "tokens_per_s", 529804, "world"),
    "Megatron-LM": (lines(MEGATRON), "flops_per_s", 238.3e12, "device"),
    "Megatron-LM, time": (lines(MEGATRON), "step_s", 5.4809, ""),
    "torchtitan": (lines(TITAN), "tokens_per_s", 9997, "device"),
    "torchtitan, MFU": (lines(TITAN), "mfu", 0.1391, ""),
    "torchtitan, TFLOP/s": (lines(TITAN), "flops_per_s", 312.25e12, "device"),
    "MaxText": (lines(MAXTEXT), "tokens_per_s", 36653.2, "device"),
    "MaxText, TFLOP/s": (lines(MAXTEXT), "flops_per_s", 257.9e12, "device"),
    "OLMo": (lines(OLMO), "mfu", 0.401, ""),
    "OLMo, TPS": (lines(OLMO), "tokens_per_s", 46001, "device"),
    "Hugging Face Trainer": (lines(PRINTED), "steps_per_s", 0.5, ""),
    "Megatron-LM, GPT-NeoX's": (lines(GPT_NEOX), "flops_per_s", 25e12, "device"),
}


@pytest.mark.parametrize("case", CONSOLES)
def test_a_console_is_read_as_its_writer_meant_it(case: str, tmp_path: Path) -> None:
    text, quantity, value, scope = CONSOLES[case]
    log = read(tmp_path, text)
    assert log.format == f"{case.partition(',')[0]}, console text"
    assert seen(log, quantity) == (pytest.approx(value), scope)


def test_fairseqs_words_per_second_are_of_all_gpus(tmp_path: Path) -> None:
    assert seen(read(tmp_path, lines(FAIRSEQ)), "tokens_per_s") == (30123.5, "world")


MOSAIC = {
    "Model": "7b", "SeqLen (T)": "2048", "# GPUs": "8", "GPU": "h100_80gb", "MFU": "46.44", "HFU": "46.44",
    "Model TFLOP": "4.595096E+14", "GlobalBatchSize": "48", "Throughput (S/s)": "41", "Throughput (T/s)": "85144",
    "Throughput (T/s/GPU)": "10643", "GlobalBatchSize (T)": "98304", "Precision": "amp_bf16", "NumParams": "6658859008",
}  # fmt: skip
STATE = {
    "total_flos": 1.5e17,
    "log_history": [
        *({"loss": 1.9, "epoch": 0.1 * i, "step": 10 * i, "num_input_tokens_seen": 655360 * i} for i in range(1, 11)),
        {"train_runtime": 200.0, "train_samples_per_second": 160.0, "train_steps_per_second": 0.5, "step": 100},
    ],
}
ROWS = [{"step": i, "time_ms": 250 + i % 2, "train/mfu": 0.41, "loss": 3.0} for i in range(6)]


def delimited(by: str) -> str:
    return "\n".join([by.join(ROWS[0]), *(by.join(map(str, row.values())) for row in ROWS)])


def markdown(row: dict[str, str]) -> str:
    cells = ["|  " + " | ".join(part) + " |" for part in (row, ["---"] * len(row), row.values())]
    return "\n".join(cells)


TABLES = {
    "CSV": (delimited(","), "mfu", 0.41),
    "TSV": (delimited("\t"), "step_s", 0.2505),
    "table by ';'": (delimited(";"), "step_s", 0.2505),
    "table by '|'": (delimited("|"), "step_s", 0.2505),
    "JSON lines": ("\n".join(map(json.dumps, ROWS)), "step_s", 0.2505),
    "JSON array": (json.dumps(ROWS), "step_s", 0.2505),
    "JSON": (json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}), "step_s", 0.2505),
    "llm-foundry, Markdown table": (markdown(MOSAIC), "mfu", 0.4644),
    "llm-foundry, CSV": (",".join(MOSAIC) + "\n" + ",".join(MOSAIC.values()), "mfu", 0.4644),
    "Hugging Face Trainer, trainer_state.json": (json.dumps(STATE, indent=2), "total_flops", 1.5e17),
    "torchtitan, CSV": ("step,throughput(tps),mfu(%),tflops\n0,10643,46.4,459.5\n", "mfu", 0.464),
    "Megatron-LM, CSV": ("iteration,elapsed time per iteration (ms)\n0,5400.0\n1,5400.0\n", "step_s", 5.4),
    "Lightning's ThroughputMonitor, CSV": (
        "device/items_per_sec,device/mfu,step,train/device/mfu\n16384,0.30,0,\n", "mfu", 0.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_as_its_writer_meant_it(name: str, tmp_path: Path) -> None:
    text, quantity, value = TABLES[name]
    log = read(tmp_path, text, name="table.txt")
    assert log.format == name
    assert seen(log, quantity)[0] == pytest.approx(value)


def test_a_table_of_llm_foundry_says_device_precision_gpus_and_parameters(tmp_path: Path) -> None:
    log = read(tmp_path, markdown(MOSAIC))
    assert log.texts == {"device_name": "h100_80gb", "precision": "amp_bf16"}
    assert (log.constant("gpus"), log.constant("parameters")) == (8, 6658859008)
    for scope, rate in (("world", 85144), ("device", 10643)):
        column = log.column("tokens_per_s", scope=scope)
        assert column is not None
        assert column.median == rate
    flops = log.column("flops_per_s")
    assert flops is not None
    assert flops.median == pytest.approx(4.595096e14)  # its header says TFLOP, its cells hold FLOP/s


# What happens to logs.


def test_colours_and_progress_bars_do_not_matter(tmp_path: Path) -> None:
    coloured = lines(TITAN).replace("step:", "\x1b[31mstep:\x1b[0m").replace("mfu:", "\x1b[38;5;4mmfu:\x1b[39m")
    assert seen(read(tmp_path, coloured), "mfu")[0] == pytest.approx(0.1391)
    bar = lines(NANOGPT, mfu="44.85").replace("\n", "\r") + "done\n"
    assert seen(read(tmp_path, bar), "mfu")[0] == pytest.approx(0.4485)


def test_of_interleaved_ranks_the_first_is_used_and_the_others_are_counted(tmp_path: Path) -> None:
    text = "".join(
        f"[rank{r}]: iter {i}: loss 1.0, time 250.00ms, mfu {40 + r}.00%\n" for i in range(5) for r in range(4)
    )
    log = read(tmp_path, text)
    assert seen(log, "mfu")[0] == pytest.approx(0.40)
    assert any("rank 0 are used, 15 of others" in note for note in log.notes)


def test_lines_that_are_cut_off_cost_themselves(tmp_path: Path) -> None:
    text = lines(NANOCHAT) + NANOCHAT.format(i=7)[:52] + "\nTraceback (most recent call last):\n  File x, line 3\n"
    log = read(tmp_path, text)
    assert seen(log, "mfu")[0] == pytest.approx(0.7414)
    cut = "step,mfu,tps\n1,0.4,900\n2,0.4,900\n3,0."
    log = read(tmp_path, cut, name="m.csv")
    assert log.rows == 2
    assert any("1 lines cannot be used, the first is line 4" in note for note in log.notes)


def test_a_header_that_a_restart_wrote_again_is_no_row(tmp_path: Path) -> None:
    log = read(tmp_path, "step,mfu\n1,0.4\n2,0.4\nstep,mfu\n2,0.5\n3,0.5\n", name="m.csv")
    assert log.rows == 4
    assert seen(log, "mfu")[0] == pytest.approx(0.45)
    assert any("repeats the header" in note for note in log.notes)


def test_words_above_a_table_do_not_matter(tmp_path: Path) -> None:
    log = read(tmp_path, "Run started on node-3\n\nstep,mfu\n1,0.4\n2,0.4\n", name="m.csv")
    assert (log.format, log.rows) == ("CSV", 2)


@pytest.mark.parametrize(
    ("cells", "value"),
    [
        (("0,41", "0,42"), 0.415),
        (("46,2 %", "46,4 %"), 0.463),
        (("46.2%", "46.4%"), 0.463),
    ],
)
def test_numbers_of_other_languages(cells: tuple[str, str], value: float, tmp_path: Path) -> None:
    log = read(tmp_path, "step;mfu\n1;{}\n2;{}\n".format(*cells), name="m.csv")
    assert seen(log, "mfu")[0] == pytest.approx(value)


@pytest.mark.parametrize(
    "rate", ["81,909", "81.909,0", "81 909", "81'909", "81_909", "81\u202f909", "81.909k", "81909"]
)
def test_separators_of_thousands(rate: str, tmp_path: Path) -> None:
    log = read(tmp_path, f"step\ttokens_per_s\n1\t{rate}\n2\t{rate}\n", name="m.tsv")
    assert seen(log, "tokens_per_s")[0] == pytest.approx(81909)


def test_a_column_of_sentinels_is_left_out_and_the_others_are_used(tmp_path: Path) -> None:
    log = read(tmp_path, lines(LLM_C, mfu="-100.0"))
    assert log.column("mfu") is None
    assert seen(log, "tokens_per_s") == (81909, "world")
    assert any("'bf16 MFU': no value in 6 of 6 cells; the column is left out" in note for note in log.notes)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_files_are_known_by_their_content(pack: object, tmp_path: Path) -> None:
    packed = pack(lines(NANOGPT, mfu="44.85").encode())  # type: ignore[operator]
    assert seen(read(tmp_path, packed, name="log"), "mfu")[0] == pytest.approx(0.4485)


def test_an_archive_that_ends_early_gives_what_it_holds(tmp_path: Path) -> None:
    import random

    noise = "".join(f"word {random.Random(i).random()}\n" for i in range(2000))
    packed = gzip.compress((lines(NANOGPT, mfu="44.85") + noise).encode())
    assert seen(read(tmp_path, packed[: len(packed) - 2000]), "mfu")[0] == pytest.approx(0.4485)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines(NANOGPT, mfu="44.85").encode())))
    assert seen(read_log(Path("-")), "mfu")[0] == pytest.approx(0.4485)


def test_utf_16_as_powershell_writes_it(tmp_path: Path) -> None:
    assert seen(read(tmp_path, lines(NANOGPT, mfu="44.85").encode("utf-16")), "mfu")[0] == pytest.approx(0.4485)


def test_exports_of_wandb_are_read_without_the_band_of_the_chart(tmp_path: Path) -> None:
    names = ("Step", *(f"swift-sun-7 - train/mfu{end}" for end in ("", "__MIN", "__MAX")))
    text = ",".join(f'"{name}"' for name in names) + '\n"1","0.4","0.1","0.9"\n'
    log = read(tmp_path, text, name="export.csv")
    assert [(c.quantity, c.values) for c in log.columns] == [("step", (1.0,)), ("mfu", (0.4,))]


def test_an_offline_run_of_wandb(tmp_path: Path) -> None:
    """As wandb/sdk/internal/datastore.py has it: LevelDB's log of protobuf messages, one of them over two blocks."""

    def field(number: int, content: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(content)) + content

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    raw = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    messages = [b"\x08\x01" + field(5, b"x" * 32700)]  # a record of another kind fills the first block but for a rest
    for i in range(5):
        items = {"_step": str(i), "mfu": "0.4", "loss": "2.5", "note": '"fine"'}
        history = b"".join(field(1, field(1, k.encode()) + field(16, v.encode())) for k, v in items.items())
        messages.append(b"\x08\x02" + field(2, history))
    for message in messages:
        kind = 1
        while len(message) > (room := 32768 - len(raw) % 32768 - 7):
            raw += struct.pack("<IHB", 0, room, 2 if kind == 1 else 3) + message[:room]
            message, kind = message[room:], 4
        raw += struct.pack("<IHB", 0, len(message), kind) + message
    assert len(raw) > 32768
    log = read(tmp_path, raw, name="run-1.wandb")
    assert log.format == "W&B offline history"
    assert (log.rows, seen(log, "mfu")[0]) == (5, 0.4)


def test_a_run_in_mlflows_file_store(tmp_path: Path) -> None:
    metrics = tmp_path / "mlruns" / "0" / "abc" / "metrics" / "train"
    metrics.mkdir(parents=True)
    (metrics / "mfu").write_text("".join(f"170000000{i}000 0.4{i} {10 * i}\n" for i in range(5)))
    log = read_log(tmp_path / "mlruns")
    assert (log.format, seen(log, "mfu")[0]) == ("MLflow file store", 0.42)


# What cannot be read.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1" + bytes(100), "looks like a Parquet file; export it as CSV"),
        (b"PK\x03\x04" + bytes(100), "looks like a zip archive"),
        (b"SQLite format 3\0", "SQLite database"),
        (bytes(range(256)) * 4, "looks like binary data"),
        (b"", "is empty"),
        (b"\x1f\x8bbroken", "cannot be read"),
    ],
)
def test_a_refusal_says_what_it_looks_like_and_what_to_do(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(tmp_path, content)


def test_nesting_and_sizes_beyond_sense_are_no_crash(tmp_path: Path) -> None:
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    assert read(tmp_path, deep).columns == ()
    assert read(tmp_path, '{"mfu": 0.4, "step": ' + "9" * 5000 + "}\n").column("mfu") is None
    log = read(tmp_path, "step,mfu\n1,1e999\n2,0.4\n")
    assert seen(log, "mfu")[0] == 0.4
