"""Runs a model layer by layer over all calibration tokens.

Only the inputs of the current layer are kept for all tokens; what else a layer is called with
(position embeddings, masks) is recorded once per layer from the model's own forward, so that no
family needs code of its own here.

Shape suffixes: N samples, L tokens of a sample, D hidden_size, T tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moesaic.errors import MoesaicError
from moesaic.families import SUPPORTED, FFNs

BLOCK_TOKENS = 2048  # tokens that pass through a layer at once


@dataclass
class LayerCall:
    """What the model's forward passes to one layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stream:
    """The hidden states of all calibration tokens, at the entrance of the current layer."""

    def __init__(self, ffns: FFNs, ids_NL: Tensor, device: torch.device):
        self.ffns, self.device = ffns, device
        self.block = max(1, BLOCK_TOKENS // ids_NL.shape[1])
        # One sample is enough to see what layers are called with: samples have equal length and
        # no padding, so masks and position embeddings broadcast over the batch.
        first, self.calls = _bypass(ffns, ids_NL[:1])
        shape = (*ids_NL.shape, first.shape[-1])
        self.hidden_NLD = torch.empty(
            shape,
            dtype=first.dtype,
            device=_storage(first.nbytes * len(ids_NL), device),
        )
        for start in range(0, len(ids_NL), self.block):
            part_BL = ids_NL[start : start + self.block]
            self.hidden_NLD[start : start + self.block] = _bypass(
                ffns, part_BL
            )[0]
        self._additive: dict[type[nn.Module], bool] = {}

    def ffn_inputs(self, layer: int) -> Iterator[Tensor]:
        """Yields the inputs x (T, D) of a layer's FFN block by block; see `ffn_calls`."""
        return (x.reshape(-1, x.shape[-1]) for x, *_ in self.ffn_calls(layer))

    def ffn_calls(self, layer: int) -> Iterator[tuple[Tensor, ...]]:
        """Yields what a layer's FFN is called with, block by block: x, and what a router chose.

        Where the layer's last step is to add what its FFN gives, the hidden states are left just
        before that step, and attention need not run again: take all of the inputs, once, and
        give them to `advance`.
        """
        additive = self._is_additive(layer)
        for start, hidden in self._blocks():
            if additive:
                call, before = self._without_ffn(layer, hidden)
                self.hidden_NLD[start : start + len(before)] = before.to(
                    self.storage
                )
            else:
                call = self._until_ffn(layer, hidden)
            yield call

    @property
    def tokens(self) -> int:
        return self.hidden_NLD.shape[0] * self.hidden_NLD.shape[1]

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
        """Passes all tokens through a layer, or on from the inputs that its FFN has been given."""
        if calls is not None and self._is_additive(layer):
            ffn, hidden_TD = (
                self.ffns.replaced(layer),
                self.hidden_NLD.flatten(0, 1),
            )
            done = 0
            for call in calls:
                y_TD = ffn(*(call if isinstance(call, tuple) else (call,)))
                hidden_TD[done : done + len(y_TD)] += y_TD.to(self.storage)
                done += len(y_TD)
            return
        for start, hidden in self._blocks():
            output = self._call(layer, hidden)
            self.hidden_NLD[start : start + len(output)] = output.to(
                self.hidden_NLD.device
            )

    def module_inputs(
        self, layer: int, paths: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """The inputs (T, I) of modules inside a layer, by path, for all tokens.

        One pass through the layer; the hidden states stay where they are.
        """
        seen: dict[str, list[Tensor]] = {path: [] for path in paths}
        handles = []
        for path in paths:
            module = self.ffns.base.get_submodule(path)
            handles.append(
                module.register_forward_pre_hook(_keep_input(seen[path]))
            )
        try:
            for _, hidden in self._blocks():
                self._call(layer, hidden)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, len(self.hidden_NLD), self.block):
            yield (
                start,
                self.hidden_NLD[start : start + self.block].to(self.device),
            )

    @torch.no_grad()
    def _call(self, layer: int, hidden: Tensor) -> Tensor:
        call = self.calls[layer]
        args, kwargs = send_to_device((call.args, call.kwargs), self.device)
        output: Tensor = self.ffns.layers[layer](hidden, *args, **kwargs)
        return output

    @torch.no_grad()
    def _is_additive(self, layer: int) -> bool:
        """Whether the layers of this class put out, to the last bit, x + FFN's output for some x.

        Not so where the output is normalised or scaled before it is added. Found out once, by
        running the first block through the layer with its FFN and without.
        """
        kind = type(self.ffns.layers[layer])
        if kind not in self._additive:
            self._additive[kind] = False
            # Else the FFN is no module by itself before conversion, or not the only one.
            if self.ffns.replaced_paths() == (self.ffns.ffn_path,):
                _, hidden = next(self._blocks())
                call, before = self._without_ffn(layer, hidden)
                sum_BLD = before + self.ffns.replaced(layer)(*call).view_as(
                    before
                )
                self._additive[kind] = torch.equal(
                    sum_BLD, self._call(layer, hidden)
                )
        return self._additive[kind]

    def _without_ffn(
        self, layer: int, hidden: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What a layer's FFN is called with, and the layer's output if the FFN gave zeros."""
        ffn, seen = self.ffns.replaced(layer), []

        def silent(*call: Tensor) -> Tensor:
            seen.append(call)
            return torch.zeros_like(call[0])

        kept = ffn.__dict__.get("forward")
        ffn.forward = silent
        try:
            output = self._call(layer, hidden)
        finally:
            if kept is None:
                del ffn.forward
            else:
                ffn.forward = kept
        return seen[0], output

    def _until_ffn(self, layer: int, hidden: Tensor) -> tuple[Tensor, ...]:
        """What a layer's FFN is called with; nothing after it is run."""

        def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise _ReachedFFN(inputs)

        handle = self.ffns.replaced(layer).register_forward_pre_hook(stop)
        try:
            self._call(layer, hidden)
        except _ReachedFFN as reached:
            return reached.call
        finally:
            handle.remove()
        raise RuntimeError(
            f"layer {layer} never called its FFN {self.ffns.ffn_path!r}"
        )


def _keep_input(kept: list[Tensor]) -> Callable[..., None]:
    """A hook that keeps what a module is called with, a row for each token."""

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        kept.append(x.reshape(-1, x.shape[-1]))

    return keep


class _ReachedFFN(Exception):
    # Not an error: the way out of the layer once its FFN's input is known.
    def __init__(self, call: tuple[Tensor, ...]):
        super().__init__()
        self.call = call


@torch.no_grad()
def _bypass(ffns: FFNs, ids_BL: Tensor) -> tuple[Tensor, list[LayerCall]]:
    """Runs the base model with every layer skipped: what enters layer 0, and every layer's call."""
    seen: list[Tensor] = []
    calls: list[LayerCall] = []

    def skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden_states)
        calls.append(LayerCall(args, kwargs))
        return hidden_states

    kept = [layer.__dict__.get("forward") for layer in ffns.layers]
    for layer in ffns.layers:
        layer.forward = skip
    try:
        device = next(ffns.base.parameters()).device
        ffns.base(input_ids=ids_BL.to(device), use_cache=False)
    finally:
        for layer, forward in zip(ffns.layers, kept, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
    return seen[0], calls


def _storage(needed: int, device: torch.device) -> torch.device:
    """Keeps the hidden states on the GPU where they take less than a quarter of what is free."""
    if device.type != "cuda":
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info(device)
    return device if needed < free / 4 else torch.device("cpu")


@torch.no_grad()
def check_stream(ffns: FFNs, ids_NL: Tensor) -> None:
    """Makes sure that running layer by layer is what the model does, on a few tokens.

    Raises MoesaicError for a family whose layers cannot be run one by one: they return more than
    hidden states, or take inputs that depend on the tokens.
    """
    few_NL = ids_NL[:2, :32]
    few_NL = torch.cat([few_NL, few_NL.flip(1)])
    device = next(ffns.base.parameters()).device
    outputs: list[Tensor] = []
    handle = ffns.layers[-1].register_forward_hook(
        lambda *call: outputs.append(call[2])
    )
    try:
        ffns.base(input_ids=few_NL.to(device), use_cache=False)
        handle.remove()
        stream = Stream(ffns, few_NL, device)
        for layer in range(len(ffns.layers)):
            stream.advance(layer)
        difference = (stream.hidden_NLD.to(device) - outputs[0]).float().norm()
        relative = float(
            difference / outputs[0].float().norm().clamp(min=1e-20)
        )
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        IndexError,
        KeyError,
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MoesaicError(
            f"{ffns.name}: its layers cannot be run one by one ({reason})"
        ) from error
    finally:
        handle.remove()
    tolerance = 1e-3 if outputs[0].dtype == torch.float32 else 5e-2
    if relative > tolerance:  # not finite: the conversion will say where
        raise MoesaicError(
            f"{ffns.name}: run one by one, its layers give something else (relative difference "
            f"{relative:.2g}): they take more than hidden states; supported are {SUPPORTED}"
        )
