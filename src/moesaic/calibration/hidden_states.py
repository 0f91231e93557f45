"""Runs a model layer by layer over all calibration tokens.

Only the inputs of the current layer are kept for all tokens; what else a layer is
called with (position embeddings, masks) is recorded once per layer from the model's own
forward, so that no family needs code of its own here.

Shape suffixes: N samples, B those of a block, L tokens of a sample, D hidden_size,
T tokens of a block, I inputs of a module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moesaic.calibration.calibration_set import Part
from moesaic.calibration.share import ALONE
from moesaic.errors import MoesaicError, first_line
from moesaic.families import SUPPORTED, FFNs
from moesaic.families.head import replaced_forward
from moesaic.modeling import MoesaicReplacement

BLOCK_TOKENS = 2048  # tokens that pass through a layer at once


@dataclass
class LayerCall:
    """What the model's forward passes to one layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stream:
    """The hidden states of all calibration tokens, on entering the current layer.

    Of several processes each holds those of its `part` of the windows; `ids_NL` are of
    all.
    """

    def __init__(
        self,
        ffns: FFNs,
        ids_NL: Tensor,
        device: torch.device,
        part: Part | None = None,
    ):
        self.ffns = ffns
        self.ids_NL = ids_NL
        self.device = device
        self.part = part
        self.share = ALONE if part is None else part.share
        self.own_ids_NL = ids_NL if part is None else ids_NL[part.window_N]
        samples, length = self.own_ids_NL.shape
        self.block = max(1, BLOCK_TOKENS // length)
        # One sample is enough to see what layers are called with: samples have equal
        # length and no padding, so masks and position embeddings broadcast over the
        # batch.
        first_1LD, self.calls = _bypass(ffns, self.own_ids_NL[:1])
        hidden_size = first_1LD.shape[-1]
        self.hidden_NLD = torch.empty(
            (samples, length, hidden_size),
            dtype=first_1LD.dtype,
            device=_storage(first_1LD.nbytes * samples, device),
        )
        for start in range(0, samples, self.block):
            end = start + self.block
            hidden_BLD, _ = _bypass(ffns, self.own_ids_NL[start:end])
            self.hidden_NLD[start:end] = hidden_BLD
        self._additive: dict[type[nn.Module], bool] = {}

    def twin(self) -> Stream:
        """Another one at the same place, which goes its own way."""
        other = copy.copy(self)
        other.hidden_NLD = self.hidden_NLD.clone()
        return other

    def goals(self, dense: Stream) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the states (T, D) that the FFN's output is added to, and those of `dense`.

        `dense` has passed the layer; this stream's `ffn_calls` are through when the first
        are asked for, and it has not gone on when the last are read: they are views. For
        layers that add what their FFN gives (`adds_ffn`).
        """
        pairs = zip(
            self.hidden_NLD.split(self.block),
            dense.hidden_NLD.split(self.block),
            strict=True,
        )
        for hidden_BLD, dense_BLD in pairs:
            yield hidden_BLD.flatten(0, 1), dense_BLD.flatten(0, 1)

    def ffn_inputs(self, layer: int) -> Iterator[Tensor]:
        """Yields the inputs x (T, D) of a layer's FFN block by block.

        See `ffn_calls`.
        """
        for x, *_ in self.ffn_calls(layer):
            yield x.reshape(-1, x.shape[-1])

    def ffn_calls(self, layer: int) -> Iterator[tuple[Tensor, ...]]:
        """Yields what a layer's FFN is called with, block by block.

        That is x, and what a router chose. Where the layer's last step is to add what
        its FFN gives, the hidden states are left just before that step, and attention
        need not run again: take all of the inputs, once, and give them to `advance`.
        """
        additive = self.adds_ffn(layer)
        for samples, hidden_BLD in self._blocks():
            if additive:
                call, residual_BLD = self._without_ffn(layer, hidden_BLD)
                self.hidden_NLD[samples] = residual_BLD.to(self.storage)
            else:
                call = self._until_ffn(layer, hidden_BLD)
            yield call

    def run_until_ffn(self, layer: int) -> None:
        """All tokens, for hooks on what a layer does before its FFN; no one moves on."""
        for _, hidden_BLD in self._blocks():
            self._until_ffn(layer, hidden_BLD)

    @property
    def tokens(self) -> int:
        samples, length, _ = self.hidden_NLD.shape
        return samples * length

    @property
    def storage(self) -> torch.device:
        """Where what is kept for all tokens lies."""
        return self.hidden_NLD.device

    @torch.no_grad()
    def advance(
        self,
        layer: int,
        calls: Iterable[Tensor | tuple[Tensor, ...]] | None = None,
    ) -> None:
        """Passes all tokens through a layer.

        Or on from the `calls` that its FFN has been given.
        """
        if calls is not None and self.adds_ffn(layer):
            self._add_ffn(layer, calls)
            return
        module = self.ffns.layers[layer]
        for samples, hidden_BLD in self._blocks():
            self._tell(module, self.own_ids_NL[samples].flatten())
            output_BLD = self._call(layer, hidden_BLD)
            self.hidden_NLD[samples] = output_BLD.to(self.storage)

    def _add_ffn(
        self,
        layer: int,
        calls: Iterable[Tensor | tuple[Tensor, ...]],
    ) -> None:
        """Adds what the FFN gives to the hidden states just before that step."""
        ffn = self.ffns.replaced(layer)
        hidden_TD = self.hidden_NLD.flatten(0, 1)
        ids_T = self.own_ids_NL.flatten()
        start = 0
        for call in calls:
            arguments = call if isinstance(call, tuple) else (call,)
            end = start + len(arguments[0])
            self._tell(ffn, ids_T[start:end])
            output_TD = ffn(*arguments)
            hidden_TD[start:end] += output_TD.to(self.storage)
            start = end

    def _tell(self, module: nn.Module, ids_T: Tensor) -> None:
        """Which tokens come next, for routers inside that choose by that."""
        for inner in module.modules():
            if isinstance(inner, MoesaicReplacement):
                inner.tell(ids_T.to(self.device))

    def module_inputs(
        self, layer: int, paths: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """The inputs (T, I) of modules inside a layer, by path, for all tokens.

        One pass through the layer; the hidden states stay where they are.
        """
        decoder_layer = self.ffns.layers[layer]
        inputs: dict[str, list[Tensor]] = {path: [] for path in paths}
        handles = []
        for path in paths:
            module = self.ffns.base.get_submodule(path)
            hook = _keep_input(inputs[path], self.storage)
            handles.append(module.register_forward_pre_hook(hook))
        try:
            for samples, hidden_BLD in self._blocks():
                self._tell(decoder_layer, self.own_ids_NL[samples].flatten())
                self._call(layer, hidden_BLD)
        finally:
            for handle in handles:
                handle.remove()
        return inputs

    def outputs(self, layer: int, samples: int) -> Tensor:
        """What a layer puts out (N, L, D) for the first so many samples."""
        hidden_NLD = self.hidden_NLD[:samples]
        ids_NL = self.own_ids_NL[:samples]
        pairs = zip(
            hidden_NLD.split(self.block), ids_NL.split(self.block), strict=True
        )
        blocks = []
        for hidden_BLD, ids_BL in pairs:
            self._tell(self.ffns.layers[layer], ids_BL.flatten())
            output_BLD = self._call(layer, hidden_BLD.to(self.device))
            blocks.append(output_BLD)
        return torch.cat(blocks)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Which samples a block holds, and their hidden states (B, L, D)."""
        for start in range(0, len(self.hidden_NLD), self.block):
            samples = slice(start, start + self.block)
            yield samples, self.hidden_NLD[samples].to(self.device)

    @torch.no_grad()
    def _call(self, layer: int, hidden_BLD: Tensor) -> Tensor:
        """The output (B, L, D) of a layer."""
        call = self.calls[layer]
        args, kwargs = send_to_device((call.args, call.kwargs), self.device)
        module = self.ffns.layers[layer]
        output_BLD: Tensor = module(hidden_BLD, *args, **kwargs)
        return output_BLD

    @torch.no_grad()
    def adds_ffn(self, layer: int) -> bool:
        """Whether layers of this class put out x + FFN's output for some x.

        To the last bit. Not so where the output is normalised or scaled before it is
        added. Found out once, by running the first block through the layer with its FFN
        and without.
        """
        kind = type(self.ffns.layers[layer])
        if kind not in self._additive:
            found = self._adds_its_ffn(layer)
            self._additive[kind] = self.share.agreed(found)
        return self._additive[kind]

    def _adds_its_ffn(self, layer: int) -> bool:
        # Else the FFN is no module by itself before conversion, or not the only one.
        if self.ffns.replaced_paths() != (self.ffns.ffn_path,):
            return False
        _, hidden_BLD = next(self._blocks())
        call, residual_BLD = self._without_ffn(layer, hidden_BLD)
        ffn_output = self.ffns.replaced(layer)(*call)
        sum_BLD = residual_BLD + ffn_output.view_as(residual_BLD)
        output_BLD = self._call(layer, hidden_BLD)
        return torch.equal(sum_BLD, output_BLD)

    def _without_ffn(
        self,
        layer: int,
        hidden_BLD: Tensor,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What a layer's FFN is called with, and the layer's output without it."""
        ffn = self.ffns.replaced(layer)
        calls = []

        def silent(*call: Tensor) -> Tensor:
            calls.append(call)
            return torch.zeros_like(call[0])

        with replaced_forward(ffn, silent):
            output_BLD = self._call(layer, hidden_BLD)
        return calls[0], output_BLD

    def _until_ffn(self, layer: int, hidden_BLD: Tensor) -> tuple[Tensor, ...]:
        """What a layer's FFN is called with; nothing after it is run."""

        def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise _ReachedFFN(inputs)

        ffn = self.ffns.replaced(layer)
        try:
            with ffn.register_forward_pre_hook(stop):
                self._call(layer, hidden_BLD)
        except _ReachedFFN as reached:
            return reached.call
        raise RuntimeError(
            f"layer {layer} never called its FFN {self.ffns.ffn_path!r}"
        )


def _keep_input(
    inputs: list[Tensor], storage: torch.device
) -> Callable[..., None]:
    """A hook that keeps what a module is called with, a row for each token."""

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        inputs.append(x.reshape(-1, x.shape[-1]).to(storage))

    return keep


class _ReachedFFN(Exception):
    # Not an error: the way out of the layer once its FFN's input is known.
    def __init__(self, call: tuple[Tensor, ...]):
        super().__init__()
        self.call = call


@torch.no_grad()
def _bypass(ffns: FFNs, ids_BL: Tensor) -> tuple[Tensor, list[LayerCall]]:
    """Runs the base model with every layer skipped.

    Gives what enters layer 0, and every layer's call.
    """
    entering: list[Tensor] = []
    calls: list[LayerCall] = []

    def skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        entering.append(hidden_states)
        calls.append(LayerCall(args, kwargs))
        return hidden_states

    with ExitStack() as replaced:
        for layer in ffns.layers:
            replaced.enter_context(replaced_forward(layer, skip))
        device = next(ffns.base.parameters()).device
        ffns.base(input_ids=ids_BL.to(device), use_cache=False)
    return entering[0], calls


def _storage(needed_bytes: int, device: torch.device) -> torch.device:
    """Where the hidden states are kept.

    On the GPU where they take less than an eighth of what is free: the FFN's inputs, the
    hidden states beside them and those of the dense model are as many each.
    """
    cpu = torch.device("cpu")
    if device.type != "cuda":
        return cpu
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if needed_bytes < free_bytes / 8 else cpu


@torch.no_grad()
def check_stream(ffns: FFNs, ids_NL: Tensor) -> None:
    """Makes sure that running layer by layer is what the model does.

    Tries a few tokens. Raises MoesaicError for a family whose layers cannot be run one
    by one: they return more than hidden states, or take inputs that depend on the
    tokens.
    """
    first_NL = ids_NL[:2, :32]
    probe_NL = torch.cat([first_NL, first_NL.flip(1)])
    device = next(ffns.base.parameters()).device
    outputs: list[Tensor] = []

    def keep_output(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(output)

    handle = ffns.layers[-1].register_forward_hook(keep_output)
    try:
        ffns.base(input_ids=probe_NL.to(device), use_cache=False)
        handle.remove()
        stream = Stream(ffns, probe_NL, device)
        for layer in range(len(ffns.layers)):
            stream.advance(layer)
        output = outputs[0]
        difference = stream.hidden_NLD.to(device) - output
        size = output.float().norm().clamp(min=1e-20)
        relative = float(difference.float().norm() / size)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        IndexError,
        KeyError,
    ) as error:
        reason = first_line(error)
        raise MoesaicError(
            f"{ffns.name}: its layers cannot be run one by one ({reason})"
        ) from error
    finally:
        handle.remove()
    tolerance = 1e-3 if output.dtype == torch.float32 else 5e-2
    if relative > tolerance:  # not finite: the conversion will say where
        raise MoesaicError(
            f"{ffns.name}: run one by one, its layers give something else "
            f"(relative difference {relative:.2g}): they take more than hidden "
            f"states; supported are {SUPPORTED}"
        )
