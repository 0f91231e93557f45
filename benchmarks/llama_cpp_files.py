"""GGUF files quantised and measured by llama.cpp; runs in the engine's own Python.

    python llama_cpp_files.py quantise FILE.gguf NEW.gguf q4_0
    python llama_cpp_files.py perplexity FILE.gguf IDS.json LENGTH

IDS.json is a list of token ids. Prints one number, the perplexity: windows of LENGTH tokens, each
by itself, its first token not predicted, as `moesaic eval` measures it.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys

import llama_cpp
import numpy as np

KINDS = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
}


def quantise(path: str, new_path: str, kind: str) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = KINDS[kind]
    options.nthread = 1
    # Alike in all files: llama.cpp would give tied embeddings more bits than others.
    options.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    options.output_tensor_type = llama_cpp.GGML_TYPE_Q8_0
    failed = llama_cpp.llama_model_quantize(
        path.encode(), new_path.encode(), ctypes.byref(options)
    )
    if failed:
        sys.exit(f"llama.cpp did not quantise {path}")


def perplexity(path: str, ids_path: str, length: int) -> float:
    with open(ids_path) as file:
        ids = json.load(file)
    llama = llama_cpp.Llama(
        path, n_ctx=length, n_batch=length, logits_all=True, verbose=False
    )
    loss = 0.0
    predicted = 0
    for start in range(0, len(ids) - length + 1, length):
        window = ids[start : start + length]
        llama.reset()
        llama.eval(window)
        logits_LV = np.array(llama.scores[: length - 1], dtype=np.float64)
        highest_L = logits_LV.max(axis=1)
        exp_LV = np.exp(logits_LV - highest_L[:, None])
        log_sum_L = np.log(exp_LV.sum(axis=1)) + highest_L
        places = np.arange(length - 1)
        chosen_L = logits_LV[places, window[1:]]
        loss += float((log_sum_L - chosen_L).sum())
        predicted += length - 1
    return math.exp(loss / predicted)


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "quantise":
        quantise(*words)
    else:
        path, ids_path, length = words
        print(perplexity(path, ids_path, int(length)))


if __name__ == "__main__":
    main()
