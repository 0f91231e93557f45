"""Exports served by vLLM and llama.cpp, against transformers in fp32: `make test-engines`.

Each model is converted, exported and asked for greedy tokens with their log-probabilities. Every
token must be transformers' own choice, or tie with it; every log-probability must agree. Where
two experts of a token tie in float32 an engine may run the other one: from there on that answer
is not held to the bounds, and is counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import moesaic
from moesaic.calibration.text import to_ids
from moesaic.demo import demo_path
from moesaic.families.load import load_model, load_tokenizer
from moesaic.modeling import MoesaicThresholdedLinear
from tests.stock_models import dense_model, tokenizer

HERE = Path(__file__).parent
SHARED = Path(__file__).parents[3] / "shared"
PROMPTS, PROMPT, ANSWER = 6, 16, 16  # prompts, their tokens, tokens asked for
TIE = 1e-3  # of two log-probabilities
# Largest difference of log-probabilities, and of two scores in [0, 1] that count as a tie of
# experts: two steps of float32; llama.cpp's keys and values are in float16.
BOUNDS = {
    "vLLM": (1e-4, 2.0**-23),
    # Keys and values in float16 move scores, which are scaled down to some 2^-8, by 2^-11 of that.
    "llama.cpp": (5e-2, 2.0**-18),
    "float16": (5e-2, 2.0**-20),
    "bfloat16": (0.2, 2.0**-16),
    "q8_0": (0.2, 2.0**-16),
}
# Prompts of which so many may meet one.
MOST_TIES = {"vLLM": 2, "llama.cpp": PROMPTS // 2}
console = Console(width=130)


def as_in_vllm(model: Any) -> Any:
    """There the first tokens of a prompt skip inputs as all others do."""
    for module in model.modules():
        if isinstance(module, MoesaicThresholdedLinear):
            module.dense_start = 0.0
    return model


def dense_folders(root: Path) -> dict[str, Path]:
    """Real models and tiny random ones, whose attention the engines have kernels for."""
    found = {"demo": demo_path()}
    if (SHARED / "models").is_dir():
        found["stories260K"] = SHARED / "models" / "stories260K"
    random = ("qwen2", "qwen3", "phi3", "mistral", "qwen2, dense middle", "mistral, dense first")
    for name in random:
        folder, family = root / f"dense-{name}", name.partition(",")[0]
        dense_model(family, hidden=128, neurons=352, layers=3).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        found[name] = folder
    return found


def convert(name: str, dense: Path, root: Path, recipe: str) -> Path:
    """Converts a model; of one whose name says so the first or a middle layer stays dense."""
    folder = root / f"{name}-{recipe}"
    kept = {"first": (0,), "middle": (1,)}.get(name.rpartition(" ")[2], ())
    if not folder.exists():
        text = "demo"
        ids = to_ids(text, load_tokenizer(dense))
        method = moesaic.load_method(recipe)
        if recipe == "moesaic-neurons":  # engines are to choose, also where they read a prompt
            method = moesaic.load_method(recipe, {"prompts": "each"})
        budget: dict[str, Any] = {"layout": "S2A4E8"}
        if recipe in ("teal", "wina"):  # linear layers that skip inputs
            budget = {"sparsity": 0.25}
        moesaic.convert(
            load_model(dense, "float32"), method, calibration=ids,
            tokenizer=load_tokenizer(dense), samples=16, sequence_length=64, output=folder,
            dense_layers=kept, **budget,
        )  # fmt: skip
    return folder


def prompts_of(folder: Path) -> list[list[int]]:
    ids = to_ids("demo", load_tokenizer(folder), heldout=True)
    return ids[: PROMPTS * PROMPT].view(PROMPTS, PROMPT).tolist()


def ask(python: Path, script: str, model: Path, prompts: Any, root: Path, *more: str) -> Any:
    asked, answers = root / "prompts.json", root / "answers.json"
    asked.write_text(json.dumps(prompts))
    answers.unlink(missing_ok=True)
    words = [python, HERE / script, model, str(ANSWER), asked, answers, *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not answers.exists():
        raise SystemExit(f"{script} failed on {model}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return json.loads(answers.read_text())


@torch.no_grad()
def judge(model: Any, prompts: Any, answers: Any, engine: str) -> tuple[float, int, int, bool]:
    """Largest difference of log-probabilities, ties of tokens and of experts, whether all is well.

    `model` is transformers' in fp32, which reads every answer at once.
    """
    bound, same = BOUNDS[engine]
    largest, tied, expert_ties, fine = 0.0, 0, 0, True
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) != ANSWER:
            return math.inf, 0, 0, False
        ids = torch.tensor([prompt + [token for token, _ in answer]])
        with _margins(model) as margins:
            logp_LV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        # Positions from which on another expert may have run.
        margin_L = torch.stack(margins).amin(0) if margins else torch.ones(ids.shape[1])
        tie = (margin_L < same).nonzero().flatten().tolist()
        for step, (token, logp) in enumerate(answer):
            place = len(prompt) - 1 + step
            difference = abs(logp_LV[place, token].item() - logp)
            gap = (logp_LV[place].max() - logp_LV[place, token]).item()
            if not difference <= bound or gap > max(TIE, bound if bound > 0.1 else 0):
                if tie and tie[0] <= place:
                    expert_ties += 1
                    break
                fine = False
            tied += gap > 0
            largest = max(largest, difference)
    return largest, tied, expert_ties, fine


class _margins:
    """Between the last expert that runs and the first that does not, by layer and token.

    Of stock routers: ours do not round scores to a tiny range.
    """

    def __init__(self, model: Any):
        self.modules = [
            layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")
        ]
        self.found: list[torch.Tensor] = []

    def __enter__(self) -> list[torch.Tensor]:
        self.handles = [module.register_forward_hook(self.hook) for module in self.modules]
        return self.found

    def hook(self, module: Any, inputs: Any, output: Any) -> None:
        logits_TR, _, index_TK = output
        active = index_TK.shape[1]
        score_TR = logits_TR.float().sigmoid() + getattr(module, "e_score_correction_bias", 0.0)
        top_TK = score_TR.topk(active + 1, dim=1).values
        self.found.append(top_TK[:, active - 1] - top_TK[:, active])

    def __exit__(self, *unused: object) -> None:
        for handle in self.handles:
            handle.remove()


def serve(words: list[Any], ask_at: Callable[[str], Any]) -> Any:
    """Starts an HTTP server, asks it, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
    # vLLM would ask for nearly all of the machine's memory.
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    words = [*map(str, words), "--port", str(port)]
    server = subprocess.Popen(words, stdout=log, stderr=log, env=env)
    try:
        for _ in range(300):
            if server.poll() is not None:
                break
            try:
                return ask_at(f"http://127.0.0.1:{port}/v1")
            except OSError:
                time.sleep(1)
        log.seek(0)
        raise SystemExit(f"no answer from {words}:\n{log.read()[-3000:]}")
    finally:
        server.terminate()
        server.wait()


def timed(model: Path, against: Path | None, engine: str, python: Path, root: Path) -> list[str]:
    """What is wrong with `moesaic bench` of a model in an engine: nothing, or lines that say it."""
    found = root / "bench.json"
    found.unlink(missing_ok=True)
    words = [
        sys.executable, "-m", "moesaic", "bench", model, "--against", against or "none",
        "--engine", engine, "--engine-python", python, "--prefill", 16, "--decode", 96,
        "--batch", "1,2", "--rounds", 1, "--json", found,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"bench in {engine} ended with {done.returncode}: {done.stderr[-3000:]}"]
    console.print(done.stdout)
    rows = json.loads(found.read_text())["rows"]
    regimes = [(row["kind"], row["batch"]) for row in rows]
    wrong = []
    if sorted(regimes) != [("decode", 1), ("decode", 2), ("prefill", 1), ("prefill", 2)]:
        wrong.append(f"bench in {engine} timed {regimes}")
    models = 1 if against is None else 2
    for row in rows:
        speeds = row["tokens_per_second"]
        if len(speeds) != models or min(speeds) <= 0:
            wrong.append(f"bench in {engine} found {row}")
    return wrong


def complete(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    body["repeat_penalty"] = 1  # llama.cpp's server has another default
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


class Engines:
    """The engines' Pythons, a folder to work in, and what was found so far."""

    def __init__(self, vllm: Path, llama: Path, root: Path):
        self.vllm, self.llama, self.root = vllm, llama, root
        columns = ("engine", "model", "as", "largest difference", "token ties", "expert ties", "")
        self.table = Table(*columns)
        self.failed: list[str] = []

    def row(self, engine: str, name: str, form: str, found: tuple[float, int, int, bool]) -> None:
        largest, tied, expert_ties, fine = found
        well = fine and expert_ties <= MOST_TIES[engine]
        self.failed.extend([] if well else [f"{engine} {name} {form}"])
        self.table.add_row(
            engine, name, form, f"{largest:.1e}", str(tied), f"{expert_ties} of {PROMPTS}",
            "as transformers" if well else "DIFFERS",
        )  # fmt: skip
        console.print(f"{engine}, {name}, {form}: {largest:.1e} {'' if well else 'DIFFERS'}")

    def exports(self, name: str, dense: Path) -> None:
        """A converted model in every stock form that holds it."""
        root = self.root
        folder = convert(name, dense, root, "moesaic")
        prompts = prompts_of(folder)
        reasons = moesaic.explain(folder)
        for form in ("glm4_moe", "qwen2_moe"):
            if reasons[form]:
                continue
            output = root / f"{name}-{form}"
            moesaic.export(folder, form, output)
            stock = AutoModelForCausalLM.from_pretrained(output).eval()
            if stock.config.head_dim % 32 == 0:  # vLLM's CPU attention knows no others
                answers = ask(self.vllm, "ask_vllm.py", output, prompts, root)
                self.row("vLLM", name, form, judge(stock, prompts, answers, "vLLM"))
            one = {"glm4_moe": "gguf", "qwen2_moe": "gguf-qwen2moe"}[form]
            if reasons[one]:
                continue
            # llama.cpp reads "phi3" in a file's name, and then wants Phi-3's own tokens.
            file = root / f"{name}-file" / f"{form}.gguf"
            moesaic.export(folder, one, file)
            text = "def the(cat): in a hat"
            *answers, cut = ask(self.llama, "ask_llama.py", file, prompts, root, text)
            self.row("llama.cpp", name, one, judge(stock, prompts, answers, "llama.cpp"))
            if cut != load_tokenizer(folder)(text)["input_ids"]:
                self.failed.append(f"llama.cpp cuts text otherwise: {name}")

    def fewer_bits(self) -> None:
        """They are other weights: near, and read by the engine, is all there is."""
        root = self.root
        prompts = prompts_of(root / "demo-moesaic")
        stock = AutoModelForCausalLM.from_pretrained(root / "demo-glm4_moe").eval()
        for dtype in ("float16", "bfloat16", "q8_0"):
            file = root / "demo-file" / f"{dtype}.gguf"
            moesaic.export(root / "demo-moesaic", "gguf", file, dtype=dtype)
            answers = ask(self.llama, "ask_llama.py", file, prompts, root)
            self.row("llama.cpp", "demo", f"gguf, {dtype}", judge(stock, prompts, answers, dtype))

    def plug_in(self, recipe: str, form: str = "plug-in", *more: str) -> None:
        """Our own architecture in vLLM."""
        folder = convert("demo", demo_path(), self.root, recipe)
        prompts = prompts_of(folder)
        answers = ask(self.vllm, "ask_vllm.py", folder, prompts, self.root, *more)
        found = judge(as_in_vllm(load_model(folder)), prompts, answers, "vLLM")
        self.row("vLLM", "demo", f"{recipe}, {form}", found)

    def over_http(self) -> None:
        prompt = "import os\n\ndef main(argv):\n    "
        folder = self.root / "demo-glm4_moe"
        stock, words = AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(folder)
        ids = torch.tensor([words(prompt)["input_ids"]])
        own = stock.generate(ids, max_new_tokens=ANSWER, do_sample=False)[0, ids.shape[1] :]
        expected = words.decode(own, skip_special_tokens=True)
        # What `vllm serve` starts; that command itself asks for a package of the name vllm.
        vllm = [self.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
                "--dtype", "float32", "--max-model-len", 64, "--enforce-eager"]  # fmt: skip
        file = self.root / "demo-file" / "glm4_moe.gguf"
        llama = [self.llama, "-m", "llama_cpp.server", "--model", file]
        for name, command in (("vLLM", vllm), ("llama.cpp", llama)):
            text = serve(command, lambda url: complete(url, str(folder), prompt))
            console.print(f"{name} over HTTP: {text!r}")
            if text != expected:
                self.failed.append(f"{name} over HTTP: {text!r} instead of {expected!r}")

    def benches(self) -> None:
        folder = self.root / "demo-glm4_moe"
        file = self.root / "demo-file" / "glm4_moe.gguf"
        self.failed += timed(folder, demo_path(), "vllm", self.vllm, self.root)
        self.failed += timed(file, None, "llama.cpp", self.llama, self.root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm", type=Path, required=True, help="its python")
    parser.add_argument("--llama", type=Path, required=True, help="its python")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        engines = Engines(arguments.vllm, arguments.llama, root)
        for name, dense in dense_folders(root).items():
            engines.exports(name, dense)
        engines.fewer_bits()
        for recipe in (
            "cmoe", "moesaic-dynamic", "moesaic-neurons", "flap", "cats", "moefication",
            "g-moefication", "llama-moe", "teal", "wina",
        ):  # fmt: skip
            engines.plug_in(recipe)
        for recipe in ("cmoe", "moesaic-dynamic", "moesaic-neurons", "teal"):
            engines.plug_in(recipe, "compiled", "--compiled")
        # Where moesaic is not installed, the code beside the weights is run.
        engines.plug_in("cmoe", "its code", "--remote-code")
        engines.over_http()
        engines.benches()
    console.print(engines.table)
    if engines.failed:
        sys.exit("\n".join(engines.failed))


if __name__ == "__main__":
    main()
