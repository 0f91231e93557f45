"""Folders quantised for transformers by torchao; runs where torchao is installed.

    pip install torchao
    python benchmarks/torchao_files.py FOLDER NEW_FOLDER w8a8
    moesaic bench NEW_FOLDER --against FOLDER

w8a8 holds weights in 8 bits with a scale for each row, and gives inputs 8 bits with a scale for
each token; w8a16 leaves inputs in 16 bits. Embeddings and head stay as they are. Neither needs
calibration. torchao 0.18 holds no 4 bits on a CPU in a form that transformers 5.23 loads.
"""

from __future__ import annotations

import sys

import torch
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

KINDS = {
    "w8a8": Int8DynamicActivationInt8WeightConfig,
    "w8a16": Int8WeightOnlyConfig,
}


def main() -> None:
    folder, new_folder, kind = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=TorchAoConfig(KINDS[kind]()),
    )
    model.save_pretrained(new_folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(new_folder)


if __name__ == "__main__":
    main()
