"""Greedy tokens and their log-probabilities from vLLM; runs in the engine's own environment.

python ask_vllm.py MODEL TOKENS PROMPTS.json ANSWERS.json [--remote-code] [--compiled]

By moesaic's plug-in where that is installed; with --remote-code by the code beside the weights,
without the plug-in. With --compiled as vLLM compiles models unless told not to.
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
BY_REMOTE_CODE = "--remote-code" in sys.argv
EAGER = "--compiled" not in sys.argv
if BY_REMOTE_CODE:
    os.environ["VLLM_PLUGINS"] = ""

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    model, count, prompts, answers = sys.argv[1:5]
    own = {"model_impl": "transformers", "trust_remote_code": True} if BY_REMOTE_CODE else {}
    llm = LLM(model, dtype="float32", enforce_eager=EAGER, max_model_len=64, **own)
    with open(prompts) as file:
        asked = [{"prompt_token_ids": ids} for ids in json.load(file)]
    sampling = SamplingParams(temperature=0, max_tokens=int(count), logprobs=1, ignore_eos=True)
    found = []
    for answer in llm.generate(asked, sampling):
        (best,) = answer.outputs
        pairs = zip(best.token_ids, best.logprobs, strict=True)
        found.append([[token, scores[token].logprob] for token, scores in pairs])
    with open(answers, "w") as file:
        json.dump(found, file)
