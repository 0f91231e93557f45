"""The token that every window of some models must begin with.

Most models read the middle of a text nearly as well without the token that begins texts
(BOS), and perplexities in papers are taken without it. Gemma cannot: of gemma-2b 649.7 on
WikiText-2 without and 21.1 with it are reported (Nota-NetsPresso/shortened-llm, pull
request 6), and lm-evaluation-harness saw the same (pull requests 1465 and 2049).

Shape suffixes: N windows, L tokens of one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def first_token(config: Any) -> int | None:
    """What every window of a model must begin with; None where nothing must."""
    kind = getattr(config, "base_model_type", None)  # of what was converted
    if kind is None:
        kind = config.model_type
    if "gemma" not in kind:
        return None
    token: int | None = config.get_text_config().bos_token_id
    return token


def begun(windows_NL: Tensor, token: int | None) -> Tensor:
    """Windows with this token in place of their first; as they are for None."""
    if token is None:
        return windows_NL
    begun_NL = windows_NL.clone()
    begun_NL[:, 0] = token
    return begun_NL
