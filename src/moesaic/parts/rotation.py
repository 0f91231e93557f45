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

from moesaic.calibration.hidden_states import Stream
from moesaic.families import find_ffns
from moesaic.modeling import with_shortcuts
from moesaic.progress import track

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
        _add_directions(gram_DD, args[0])

    handles = [norm.register_forward_pre_hook(add) for norm in _norms(model)]
    try:
        for window_L in windows_NL:
            ids_1L = window_L[None].to(device)
            model.get_decoder()(input_ids=ids_1L, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return _principal(gram_DD)


def _add_directions(gram_DD: Tensor, x: Tensor) -> None:
    """Adds x^T x of the tokens' directions, in place: how long they are counts not."""
    x_TD = x.reshape(-1, x.shape[-1]).float()
    unit_TD = nn.functional.normalize(x_TD, dim=-1)
    gram_DD.add_((unit_TD.T @ unit_TD).to(gram_DD))


def _principal(gram_DD: Tensor) -> Tensor:
    """The eigenvectors (D, D), that of the largest eigenvalue first."""
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
    _turn_embeddings(model, axes_DK)
    for layer in find_ffns(model).layers:
        for norm_path in READERS:
            _turn_readers(layer, norm_path, axes_DK)
        for path in WRITERS:
            _write_to(layer.get_submodule(path), axes_DK)
    _turn_head(model, axes_DK)


@torch.no_grad()
def rotate_blocks(
    model: Any, stream: Stream, kept: int, progress: bool
) -> None:
    """Turns and cuts the stream before every attention and every FFN by itself, in place.

    Each time to the K principal axes of what has passed the blocks before, cut already:
    Q for what enters, then Q' after attention. What passes attention by is multiplied
    with Q^T Q' (the paper's Section 3.3). Costs two passes of the tokens through every
    layer, and 2 D^3 for each; and the layers' weights once more.
    """
    ffns = stream.ffns
    axes_DK = _axes_of(stream.hidden_NLD, kept)
    _turn_embeddings(model, axes_DK)
    stream.hidden_NLD = stream.hidden_NLD @ axes_DK.to(stream.hidden_NLD)
    numbers = range(len(ffns.layers))
    for number in track(numbers, "turning layers", enabled=progress):
        layer: Any = with_shortcuts(ffns.layers[number], kept)
        ffns.layers[number] = layer
        _turn_readers(layer, "input_layernorm", axes_DK)
        # Until its axes are known, what a block puts out stands in the dense ones.
        _set_shortcut(layer, "attention_shortcut", axes_DK)
        after_attention_DK = _axes_before_ffn(stream, number, kept)
        turn_KK = after_attention_DK.T @ axes_DK.to(after_attention_DK.device)
        _set_shortcut(layer, "attention_shortcut", turn_KK)
        _write_to(layer.self_attn.o_proj, after_attention_DK)
        _turn_readers(layer, "post_attention_layernorm", after_attention_DK)
        _set_shortcut(layer, "ffn_shortcut", after_attention_DK)
        output_NLD = stream.outputs(number, len(stream.hidden_NLD))
        output_NLD = output_NLD.to(stream.storage)
        after_attention_DK = after_attention_DK.to(stream.storage)
        axes_DK = _axes_of(output_NLD, kept)
        turn_KK = axes_DK.T @ after_attention_DK
        _set_shortcut(layer, "ffn_shortcut", turn_KK)
        _write_to(layer.mlp.down_proj, axes_DK)
        # The same as passing all tokens through the layer again.
        stream.hidden_NLD = output_NLD @ axes_DK.to(output_NLD)
    _turn_head(model, axes_DK)


def _axes_before_ffn(stream: Stream, number: int, kept: int) -> Tensor:
    """The principal axes (D, K) of what a layer's FFN reads, before its norm."""
    norm: Any = stream.ffns.layers[number].get_submodule(
        "post_attention_layernorm"
    )
    width = len(norm.weight)
    gram_DD = torch.zeros(
        width, width, dtype=torch.float64, device=norm.weight.device
    )

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        _add_directions(gram_DD, args[0])

    handle = norm.register_forward_pre_hook(add)
    try:
        stream.run_until_ffn(number)
    finally:
        handle.remove()
    return _principal(gram_DD)[:, :kept]


def _axes_of(hidden_NLD: Tensor, kept: int) -> Tensor:
    """The K principal axes (D, K) of what lies there for all tokens."""
    width = hidden_NLD.shape[-1]
    gram_DD = torch.zeros(
        width, width, dtype=torch.float64, device=hidden_NLD.device
    )
    for hidden_LD in hidden_NLD:
        _add_directions(gram_DD, hidden_LD)
    return _principal(gram_DD)[:, :kept]


def _turn_embeddings(model: Any, axes_DK: Tensor) -> None:
    """E Q. The head and the embeddings are no longer one."""
    embeddings = model.get_input_embeddings()
    dense_VD = embeddings.weight.double()
    _set_weight(embeddings, dense_VD @ axes_DK.to(dense_VD.device))
    kept = axes_DK.shape[1]
    embeddings.embedding_dim = kept
    config = model.config.get_text_config()
    config.hidden_size = kept
    config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _turn_head(model: Any, axes_DK: Tensor) -> None:
    norm = model.get_decoder().norm
    _read_from(model.get_output_embeddings(), norm, axes_DK)
    _make_plain(norm, axes_DK)


def _turn_readers(layer: Any, norm_path: str, axes_DK: Tensor) -> None:
    """What reads the stream through one norm of a layer, and the norm."""
    norm = layer.get_submodule(norm_path)
    for linear in _found(layer, READERS[norm_path]):
        _read_from(linear, norm, axes_DK)
    _make_plain(norm, axes_DK)


def _make_plain(norm: Any, axes_DK: Tensor) -> None:
    """Its weights stand elsewhere; it divides by the length over the root of D."""
    width, kept = axes_DK.shape
    gain_K = torch.full((kept,), math.sqrt(width / kept))
    _set_weight(norm, gain_K)


def _set_shortcut(layer: Any, name: str, weight: Tensor) -> None:
    """A shortcut that multiplies with this matrix, outputs by inputs."""
    outputs, inputs = weight.shape
    with torch.device("meta"):
        shortcut = nn.Linear(inputs, outputs, bias=False)
    shortcut.weight = _parameter_like(layer.mlp.down_proj.weight, weight)
    setattr(layer, name, shortcut)


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
    _set_weight(linear, scaled_ND @ axes_DK.to(scaled_ND.device))
    linear.in_features = axes_DK.shape[1]


def _write_to(linear: Any, axes_DK: Tensor) -> None:
    """Q^T W, and Q^T b."""
    axes_DK = axes_DK.to(linear.weight.device)
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
