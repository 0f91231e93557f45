"""Greedy tokens and their log-probabilities from llama.cpp; runs in the engine's own environment.

python ask_llama.py MODEL.gguf TOKENS PROMPTS.json ANSWERS.json [TEXT]

With a TEXT also how its tokenizer cuts it, as the last answer.
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama, llama_cpp

default_params = llama_cpp.llama_model_default_params


def params_without_amx():
    """llama.cpp's own AMX code crashes on weights in 8 bits (its issue 20824, open)."""
    params = default_params()
    params.use_extra_bufts = False
    return params


if "amx_tile" in Path("/proc/cpuinfo").read_text():
    llama_cpp.llama_model_default_params = params_without_amx

model, count, prompts, answers, *text = sys.argv[1:]
llama = Llama(model, n_ctx=64, logits_all=True, verbose=False, n_threads=1)
found = []
with open(prompts) as file:
    asked = json.load(file)
for ids in asked:
    llama.reset()
    llama.eval(ids)
    answer = []
    for _ in range(int(count)):
        logits = np.array(llama.scores[llama.n_tokens - 1], dtype=np.float64)
        token = int(logits.argmax())
        top = logits.max()
        answer.append([token, float(logits[token] - top - np.log(np.exp(logits - top).sum()))])
        llama.eval([token])
    found.append(answer)
if text:
    found.append(llama.tokenize(text[0].encode(), add_bos=True, special=False))
with open(answers, "w") as file:
    json.dump(found, file)
