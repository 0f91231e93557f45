"""Folders quantised and measured for vLLM; runs in the engine's own Python.

    python vllm_files.py quantise FOLDER NEW_FOLDER w8a8
    python vllm_files.py perplexity FOLDER IDS.json LENGTH

Weights are rounded to the nearest, in the format of compressed-tensors: w8a8 in 8 bits with a
scale for each row, inputs in 8 bits with a scale for each token; w4a16 in 4 bits with a scale for
each 32 numbers. Embeddings, head, routers and routed experts stay as they are: on Intel and AMD
processors vLLM 0.32 runs no quantised experts without zentorch.

IDS.json is a list of token ids. Prints one number, the perplexity: windows of LENGTH tokens, each
by itself, its first token not predicted, as `moesaic eval` measures it.

Shape suffixes: O outputs, I inputs of a layer, G groups of 32 inputs.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 32
QUANTISED = re.compile(
    r"\.layers\.\d+\.(self_attn|mlp|mlp\.shared_experts)\.\w+_proj\.weight$"
)
WEIGHTS_8 = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS_4 = {"num_bits": 4, "type": "int", "symmetric": True}
GROUPS = {
    "w8a8": {
        "weights": WEIGHTS_8 | {"strategy": "channel", "dynamic": False},
        "input_activations": WEIGHTS_8 | {"strategy": "token", "dynamic": True},
    },
    "w4a16": {
        "weights": WEIGHTS_4
        | {"strategy": "group", "group_size": GROUP, "dynamic": False},
    },
}
FORMATS = {"w8a8": "int-quantized", "w4a16": "pack-quantized"}


def quantise(folder: Path, new_folder: Path, kind: str) -> None:
    """Written beside its place first: a run that is killed leaves no folder that looks whole."""
    partial = new_folder.with_name(f"{new_folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            shutil.copy(path, partial / path.name)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                tensors |= rounded(name, file.get_tensor(name), kind)
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    config_path = partial / "config.json"
    config = json.loads(config_path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": GROUPS[kind] | {"targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*mlp.experts.*"],
    }
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(new_folder)


def rounded(name: str, tensor: torch.Tensor, kind: str) -> dict[str, Any]:
    """What is stored for a tensor, by name."""
    if not QUANTISED.search(name):
        return {name: tensor}
    stem = name.removesuffix(".weight")
    scale = tensor.dtype
    if kind == "w8a8":
        weight_OI, scale_O1 = rounded_rows(tensor.float(), 127)
        return {
            f"{stem}.weight": weight_OI,
            f"{stem}.weight_scale": scale_O1.to(scale),
        }
    from compressed_tensors.compressors import pack_to_int32

    outputs, inputs = tensor.shape
    numbers = tensor.float().reshape(-1, GROUP)
    weight, scale_each = rounded_rows(numbers, 7)
    packed = pack_to_int32(weight.reshape(outputs, inputs), 4)
    scale_OG = scale_each.reshape(outputs, inputs // GROUP)
    return {
        f"{stem}.weight_packed": packed,
        f"{stem}.weight_scale": scale_OG.to(scale),
        f"{stem}.weight_shape": torch.tensor([outputs, inputs]),
    }


def rounded_rows(
    numbers: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -most to most, and the scale of each row."""
    largest = numbers.abs().amax(dim=1, keepdim=True)
    scale = (largest / most).clamp(min=1e-12)
    return (numbers / scale).round().to(torch.int8), scale


def perplexity(folder: str, ids_path: str, length: int) -> float:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    ids = json.loads(Path(ids_path).read_text())
    llm = vllm.LLM(folder, max_model_len=length + 1, max_num_seqs=8)
    windows = [
        ids[start : start + length]
        for start in range(0, len(ids) - length + 1, length)
    ]
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0
    )
    prompts = [{"prompt_token_ids": window} for window in windows]
    loss = 0.0
    predicted = 0
    for answer in llm.generate(prompts, sampling, use_tqdm=False):
        window = answer.prompt_token_ids
        for token, of_place in zip(
            window[1:], answer.prompt_logprobs[1:], strict=True
        ):
            loss -= of_place[token].logprob
            predicted += 1
    llm.llm_engine.engine_core.shutdown()
    return math.exp(loss / predicted)


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "quantise":
        folder, new_folder, kind = words
        quantise(Path(folder), Path(new_folder), kind)
    else:
        folder, ids_path, length = words
        # What vLLM prints goes to the standard error.
        output = os.dup(1)
        os.dup2(2, 1)
        value = perplexity(folder, ids_path, int(length))
        os.write(output, f"{value}\n".encode())
        os._exit(0)  # the threads of vLLM 0.32 may crash a process that ends


if __name__ == "__main__":
    main()
