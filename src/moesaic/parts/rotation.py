"""The residual stream in other axes: norms folded, matrices rotated, axes deleted.

An RMSNorm without its weights commutes with a rotation Q of what it is given, since the
length stays. So Q can be folded into every matrix that writes the residual stream or
reads it from a norm (Ashkboos et al., SliceGPT, arXiv:2401.15024, Theorem 1).

Shape suffixes: T tokens, D hidden_size, K axes that are kept, V vocabulary, N outputs or
I inputs of a matrix.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.families import find_ffns

# Within a decoder layer: what reads the residual stream through which norm, and what
# writes it. Not every family has all of them.
READERS = {
    "input_layernorm": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.qkv_proj",
    ),
    "post_attention_layernorm": (
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.gate_up_proj",
    ),
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")


@torch.no_grad()
def stream_axes(model: Any, windows_NL: Tensor) -> Tensor:
    """The principal axes Q (D, D) of the residual stream, the largest first, float64.

    Of x / rms(x) at every norm that reads the stream, over all these tokens, each norm
    and token counting alike. Not centred. Costs a forward pass of the tokens, 2 D^2 a
    token and norm, and D^3.
    """
    width = model.config.get_text_config().hidden_size
    device = model.get_input_embeddings().weight.device
    gram_DD = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x_TD = args[0].reshape(-1, width).float()
        x_TD = nn.functional.normalize(x_TD, dim=-1)
        gram_DD.add_((x_TD.T @ x_TD).to(gram_DD))

    handles = [norm.register_forward_pre_hook(add) for norm in _norms(model)]
    try:
        for window_L in windows_NL:
            ids_1L = window_L[None].to(device)
            model.get_decoder()(input_ids=ids_1L, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    rising = torch.linalg.eigh(gram_DD)
    axes_DD: Tensor = rising.eigenvectors.flip(1)
    return axes_DD


@torch.no_grad()
def rotate(model: Any, axes_DK: Tensor) -> None:
    """Turns a model's residual stream into these axes, in place, and cuts it to them.

    All K = D of them change nothing but rounding. Norms divide by the length of K
    axes, over the root of D, and their weights stand in the matrices that follow. The
    head and the embeddings are no longer one. Costs a copy of the model's weights.
    """
    config = model.config.get_text_config()
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    final_norm = model.get_decoder().norm
    _read_from(head, final_norm, axes_DK)
    _set_weight(embeddings, embeddings.weight.double() @ axes_DK)
    for layer in find_ffns(model).layers:
        for norm_path, paths in READERS.items():
            norm = layer.get_submodule(norm_path)
            for linear in _found(layer, paths):
                _read_from(linear, norm, axes_DK)
        for linear in _found(layer, WRITERS):
            _write_to(linear, axes_DK)
    width, kept = axes_DK.shape
    for norm in _norms(model):
        gain_K = torch.full((kept,), math.sqrt(width / kept))
        _set_weight(norm, gain_K)
    embeddings.embedding_dim = kept
    config.hidden_size = kept
    config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _norms(model: Any) -> list[Any]:
    """All modules that read the residual stream."""
    norms = [model.get_decoder().norm]
    for layer in find_ffns(model).layers:
        norms += [layer.get_submodule(path) for path in READERS]
    return norms


def _found(layer: nn.Module, paths: tuple[str, ...]) -> list[Any]:
    """Those of the modules that a layer has."""
    modules = dict(layer.named_modules())
    return [modules[path] for path in paths if path in modules]


def _read_from(linear: Any, norm: Any, axes_DK: Tensor) -> None:
    """W diag(g) Q: the weights g of the norm before it, and the rotation."""
    scaled_ND = linear.weight.double() * norm.weight.double()
    _set_weight(linear, scaled_ND @ axes_DK)
    linear.in_features = axes_DK.shape[1]


def _write_to(linear: Any, axes_DK: Tensor) -> None:
    """Q^T W, and Q^T b."""
    _set_weight(linear, axes_DK.T @ linear.weight.double())
    linear.out_features = axes_DK.shape[1]
    if linear.bias is not None:
        bias_K = axes_DK.T @ linear.bias.double()
        linear.bias = _parameter_like(linear.bias, bias_K)


def _set_weight(module: Any, weight: Tensor) -> None:
    module.weight = _parameter_like(module.weight, weight)


def _parameter_like(old: Tensor, values: Tensor) -> nn.Parameter:
    """New values of the old dtype, on its device."""
    new = values.to(old).contiguous()
    return nn.Parameter(new, old.requires_grad)
