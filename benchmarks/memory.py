"""A checkpoint several times larger than the memory that its conversion may use.

    python benchmarks/memory.py [--layers 100] [--limit-mb 1024] [--methods cmoe,moesaic]
    python benchmarks/memory.py --layers 300 --neurons 1024 --samples 10 --limit-mb 700 \
        --methods moesaic

Makes a random Llama in shards of 100 MB (hidden 1,024, FFN 4,096, bf16, 29 MB a layer) and converts
it on windows of 256 tokens, in a process of its own. Weights are fitted from two tokens a neuron
on (--neurons 1024 --samples 10). Where this user may make a memory cgroup (root, Linux), the
process is held to the limit: it ends in an error if it needs more. Printed besides: the most memory
that the process ever had of its own, which is what is not read from a file and could be dropped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch

MB = 2**20
VOCABULARY = 512
LENGTH = 256
LAYOUT = "S1A5E8"
CGROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--limit-mb", type=int, default=1024)
    parser.add_argument("--methods", default="cmoe,moesaic")
    parser.add_argument("--neurons", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        _in_child(
            _write_checkpoint, checkpoint, options.layers, options.neurons
        )
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        print(f"checkpoint: {size / MB:,.0f} MB, {options.layers} layers")
        for method in options.methods.split(","):
            cgroup = _new_cgroup(options.limit_mb * MB)
            try:
                _in_child(_convert, checkpoint, method, cgroup, options.samples)
            finally:
                _remove(cgroup)


def _in_child(function, *arguments) -> None:  # type: ignore[no-untyped-def]
    """Runs it in a new process, and ends with it where it fails."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=function, args=arguments)
    child.start()
    child.join()
    if child.exitcode != 0:
        raise SystemExit(f"{function.__name__} ended with {child.exitcode}")


def _write_checkpoint(folder: Path, layers: int, neurons: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")
    _forget_pages(folder)


def _forget_pages(folder: Path) -> None:
    """So that whoever reads the files again brings them into memory at its own charge."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _convert(
    checkpoint: Path, method: str, cgroup: Path | None, samples: int
) -> None:
    import moesaic

    libraries = _own_memory()
    limit = "no limit (no cgroup to be had)"
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        limit = f"limit {_limit_file(cgroup).read_text().strip()} bytes"
    peak = [0]
    watch = threading.Thread(target=_keep_peak, args=(peak,), daemon=True)
    watch.start()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    output = checkpoint.with_name(f"converted-{method}")
    started = time.perf_counter()
    moesaic.convert(
        str(checkpoint),
        method,
        layout=LAYOUT,
        calibration=ids,
        samples=samples,
        sequence_length=LENGTH,
        output=output,
    )
    seconds = time.perf_counter() - started
    shutil.rmtree(output)
    print(
        f"{method} {LAYOUT}: {limit}, at most {peak[0] / MB:,.0f} MB of its own, "
        f"{libraries / MB:,.0f} MB of them before it began; {seconds:.0f} s"
    )


def _keep_peak(peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], _own_memory())
        time.sleep(0.02)


def _own_memory() -> int:
    """Bytes in memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def _new_cgroup(limit: int) -> Path | None:
    """A memory cgroup with this limit, or None where none can be made."""
    is_second_version = (CGROUPS / "cgroup.controllers").is_file()
    parent = CGROUPS if is_second_version else CGROUPS / "memory"
    cgroup = parent / f"moesaic-{os.getpid()}"
    try:
        cgroup.mkdir()
        _limit_file(cgroup).write_text(str(limit))
    except OSError:
        return None
    return cgroup


def _limit_file(cgroup: Path) -> Path:
    second_version = cgroup / "memory.max"
    if second_version.exists():
        return second_version
    return cgroup / "memory.limit_in_bytes"


def _remove(cgroup: Path | None) -> None:
    if cgroup is not None:
        cgroup.rmdir()


if __name__ == "__main__":
    main()
