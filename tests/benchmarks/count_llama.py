"""How long ``mfu-monitor count`` takes on Llama 3 405B's configuration, and how much memory; no test asserts a time.

.venv/bin/python tests/benchmarks/count_llama.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""https://arxiv.org/abs/2407.21783, table 3."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        call = [sys.executable, "-c", "from mfu_monitor.cli import main; main()", "count", str(path)]
        began_s = time.perf_counter()
        out = subprocess.run([*call, "--sequence-length", "8192", "--json"], capture_output=True, text=True, check=True)
        wall_s = time.perf_counter() - began_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"model FLOPs {json.loads(out.stdout)['model_flops']:,}")
    print(f"wall {wall_s:.1f} s, processor {used.ru_utime + used.ru_stime:.1f} s, memory {used.ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
