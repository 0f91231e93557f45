"""Every option of a command reaches the function behind it, as itself."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.main import main
from moesaic.errors import MoesaicError


def what_is_asked(monkeypatch: pytest.MonkeyPatch, where: str, words: list[str]) -> dict[str, Any]:
    """What a command gives the function MODULE:NAME, by its parameters."""
    asked: dict[str, Any] = {}

    def function(*positional: Any, **named: Any) -> None:
        asked["positional"] = positional
        asked.update(named)
        raise MoesaicError("enough")

    module, _, name = where.partition(":")
    monkeypatch.setattr(import_module(module), name, function)
    monkeypatch.setattr(sys, "argv", ["moesaic", *words])
    with pytest.raises(SystemExit):
        main()
    return asked


def test_finetune(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "finetune model --output out --data text.txt --samples 11 --sequence-length 12 --epochs 13 "
        "--batch-size 14 --rank 15 --alpha 16 --lora-lr 0.17 --scale-lr 0.18 --balance-rate 0.19 "
        "--distill teacher --tune-teacher --freeze-router --adapter --micro-batch 20 "
        "--gradient-checkpointing --checkpoint-every 21 --tensorboard events --seed 22 "
        "--device cuda:3 --dtype bfloat16 --overwrite --resume --trust-remote-code"
    )
    asked = what_is_asked(monkeypatch, "moesaic.finetune.run:finetune", words.split())
    again = words.replace("--overwrite --resume ", "")  # makes the same in an empty folder
    assert asked.pop("command") == f"moesaic {again}"
    assert asked == {
        "positional": ("model", Path("out"), "text.txt"),
        "samples": 11,
        "sequence_length": 12,
        "epochs": 13,
        "batch_size": 14,
        "rank": 15,
        "alpha": 16,
        "lora_lr": 0.17,
        "scale_lr": 0.18,
        "balance_rate": 0.19,
        "distill": "teacher",
        "tune_teacher": True,
        "freeze_router": True,
        "merge": False,
        "micro_batch": 20,
        "gradient_checkpointing": True,
        "checkpoint_every": 21,
        "tensorboard": "events",
        "seed": 22,
        "device": "cuda:3",
        "dtype": "bfloat16",
        "overwrite": True,
        "resume": True,
        "trust_remote_code": True,
        "progress": True,
    }


def test_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "compare model --methods cmoe,flap --sparsity 0.3 --ffn-bytes 0.5 --ffn-macs 0.6 "
        "--layout S3A3E8 --grain fine --calibration a.txt --calibration b.txt --text c.txt "
        "--seeds 4 --samples 5 --sequence-length 6 --max-tokens 7 --finetune 8 --distill none "
        "--speed --output out --resume --device cpu --dtype float32 --trust-remote-code"
    )
    asked = what_is_asked(monkeypatch, "moesaic.comparison.compare:compare", words.split())
    assert callable(asked.pop("progress"))
    assert asked == {
        "positional": ("model", ["cmoe", "flap"]),
        "sparsity": [0.3],
        "ffn_bytes": [0.5],
        "ffn_macs": [0.6],
        "layout": "S3A3E8",
        "grain": "fine",
        "calibration": ["a.txt", "b.txt"],
        "text": ["c.txt"],
        "seeds": 4,
        "samples": 5,
        "sequence_length": 6,
        "max_tokens": 7,
        "finetune": 8,
        "distill": "none",
        "speed": True,
        "output": Path("out"),
        "resume": True,
        "device": "cpu",
        "dtype": "float32",
        "trust_remote_code": True,
    }


def test_export(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "export model --format glm4_moe --output out --epsilon 0.25 --dtype bfloat16 "
        "--verify text.txt --trust-remote-code"
    )
    asked = what_is_asked(monkeypatch, "moesaic.export.run:export", words.split())
    assert callable(asked.pop("progress"))
    assert asked == {
        "positional": ("model", "glm4_moe", Path("out")),
        "epsilon": 0.25,
        "dtype": "bfloat16",
        "verify": "text.txt",
        "trust_remote_code": True,
    }


def test_an_epsilon_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "export model --format glm4_moe --output out --epsilon small"
    assert what_is_asked(monkeypatch, "moesaic.export.run:export", words.split()) == {}
    assert "neither auto nor a number" in capsys.readouterr().err
