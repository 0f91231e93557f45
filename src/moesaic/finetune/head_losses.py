"""Losses on logits, some tokens at a time, so that all logits are never held at once.

Logits of 4,096 tokens over 49,152 words take 0.8 GB in float32, and the two losses and
their gradients take that several times over. Here only those of a chunk are there. Its
gradient with respect to the hidden states is computed at once. It is as small as they
are, and the head runs forward only once (as in Liger-Kernel: Hsu et al. 2024, arXiv
2410.10989).

Shape suffixes: B windows, L tokens of one, T tokens that count, C tokens of a chunk,
D hidden_size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, nll_loss

from moesaic.families.head import Head
from moesaic.finetune.options import Mix

CHUNK_NUMBERS = 2**23  # logits of a chunk: 32 MB in float32
IGNORED = -100  # the label of a token that is not learnt


@dataclass(frozen=True)
class HeadLosses:
    """Means over the tokens that count, in nats.

    `weighted` is their sum by the mix and has a gradient. `lm` and `logits` have none;
    `logits` is 0 without a teacher.
    """

    weighted: Tensor
    lm: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Hidden:
    """A model's last hidden states (B, L, D), or (T, D), and its head."""

    head: Head
    states: Tensor

    def only(self, counts_BL: Tensor) -> Hidden:
        """The states of some tokens (T, D)."""
        return Hidden(self.head, self.states[counts_BL])

    def log_probabilities(self, states_CD: Tensor) -> Tensor:
        """Of every word (C, V), in float32."""
        logits_CV = self.head.logits(states_CD)
        return log_softmax(logits_CV.float(), dim=-1)


def next_tokens(labels_BL: Tensor) -> Tensor:
    """The label that follows each token (B, L); IGNORED at the end of a window."""
    next_BL = torch.full_like(labels_BL, IGNORED)
    next_BL[:, :-1] = labels_BL[:, 1:]
    return next_BL


def head_losses(
    student: Hidden, teacher: Hidden | None, labels_BL: Tensor, mix: Mix
) -> HeadLosses:
    """Next-token loss, and KL(teacher || student) where there is a teacher.

    Tokens that no label follows count in neither. Time: the student's head forward and
    back, the teacher's forward. Memory: about ten chunks of logits.
    """
    next_BL = next_tokens(labels_BL)
    counts_BL = next_BL != IGNORED
    next_T = next_BL[counts_BL]
    tokens = max(1, len(next_T))
    student = student.only(counts_BL)
    if teacher is not None:
        teacher = teacher.only(counts_BL)
    hidden_TD = student.states
    gradient_TD = torch.zeros_like(hidden_TD)
    lm = torch.zeros((), device=hidden_TD.device)
    kl = torch.zeros_like(lm)
    size = max(1, CHUNK_NUMBERS // student.head.vocabulary)
    for start in range(0, len(next_T), size):
        chunk = slice(start, start + size)
        leaf_CD = hidden_TD[chunk].detach().requires_grad_()
        with torch.enable_grad():
            log_CV = student.log_probabilities(leaf_CD)
            chunk_lm = nll_loss(log_CV, next_T[chunk], reduction="sum")
            loss = mix.lm * chunk_lm
            if teacher is not None:
                chunk_kl = _kl(teacher, chunk, log_CV)
                loss = loss + mix.logits * chunk_kl
                kl += chunk_kl.detach() / tokens
        lm += chunk_lm.detach() / tokens
        (slope_CD,) = torch.autograd.grad(loss, leaf_CD)
        gradient_TD[chunk] = slope_CD / tokens
    value = mix.lm * lm + mix.logits * kl
    weighted = _with_gradient(value, hidden_TD, gradient_TD)
    return HeadLosses(weighted, lm, kl)


def _kl(teacher: Hidden, chunk: slice, log_CV: Tensor) -> Tensor:
    """KL(teacher || student), summed over the tokens of a chunk."""
    with torch.no_grad():
        target_CV = teacher.log_probabilities(teacher.states[chunk])
    return kl_div(log_CV, target_CV, reduction="sum", log_target=True)


def _with_gradient(value: Tensor, x_TD: Tensor, gradient_TD: Tensor) -> Tensor:
    """`value` itself, whose gradient with respect to x is the one given."""
    product = x_TD.float() * gradient_TD
    tangent = product.sum()
    return value + (tangent - tangent.detach())
