"""One pass of a text through a converted model: what runs for each token, what it adds.

Hooks ask each replacement (`units`, `hidden`); which method made it does not matter. No
number is measured here that the conversion's report has.

Shape suffixes: T tokens, S tokens that are shown, D hidden_size, F neurons, U units:
experts, neurons, sub-experts, or linear layers where a layer has several replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import MoesaicError
from moesaic.families import FFNs, find_ffns
from moesaic.families.load import context_of
from moesaic.modeling import MoesaicReplacement, chosen_for_each_token
from moesaic.parts.products import widened_products

MEASURED_TOKENS = 1024
SHOWN_TOKENS = 96
WINDOW = 512
LISTED_UNITS = 32  # of a token and a layer: those that add most
MARKS = 10  # the paper's K_a: the largest hidden states of a token
RATE_BINS = 20
HIGHEST_RATE = 0.2  # of the last bin's lower end; above lie few neurons


@dataclass
class Cells:
    """What ran in one layer for each token that is shown, as lists by token.

    `ran` counts units, `kept` is the share of all units' output energy in those that
    ran, `added` the norm of the layer's whole replacement over that of the residual
    stream before the layer (None: nothing stands for a whole FFN). `units` are those
    that add most, strongest first, as pairs in one row: the number of the unit, or
    -1 - number where it did not run, and its norm over the stream's, in thousandths.
    """

    ran: list[int] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    units: list[list[int]] = field(default_factory=list)


@dataclass
class LayerPass:
    """One layer on the measured tokens.

    `unit` is what is chosen for a token, in a word, None where nothing is; `names` are
    those of units that have one. `rates` is the share of tokens that each unit runs
    for. `neuron_rates` counts neurons by how often they are among a token's ten
    largest; the last bin holds all above HIGHEST_RATE.
    """

    layer: int
    unit: str | None = None
    names: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    neuron_rates: list[int] = field(default_factory=list)
    cells: Cells = field(default_factory=Cells)


@dataclass
class Pass:
    """A text's way through a model. `tokens` are the first ones, as text."""

    text: str
    measured: int
    tokens: list[str]
    layers: list[LayerPass]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure(
    model: Any,
    ids_T: Tensor,
    words: list[str],
    source: str,
    progress: Callable[[int], Any] | None = None,
    ffns: FFNs | None = None,
) -> Pass | None:
    """Passes at most MEASURED_TOKENS of a row of ids through a converted model.

    `words` are the shown tokens as text. `ffns` are the model's, where it is the dense one
    with replacements in it, which no longer tells. None where nothing stands in for a part of the
    dense model. Costs about three forward passes of those
    tokens: routers and all units are computed once more. Raises MoesaicError for ids
    that the model does not know.
    """
    embeddings = model.get_input_embeddings().weight
    if int(ids_T.max()) >= len(embeddings):
        raise MoesaicError(
            f"the text has token {int(ids_T.max())}, the model knows "
            f"0..{len(embeddings) - 1}: the tokenizer is not this model's"
        )
    watchers = _watchers(ffns or find_ffns(model))
    if not watchers:
        return None
    base = getattr(model, model.base_model_prefix, model)
    window = min(WINDOW, context_of(model.config))
    ids_T = ids_T[:MEASURED_TOKENS].to(embeddings.device)
    shown = len(words)
    with (
        widened_products(embeddings.dtype, embeddings.device),
        chosen_for_each_token(model),
        _hooked(watchers),
    ):
        for ids_1L in ids_T[None].split(window, dim=1):
            for watcher in watchers:
                watcher.begin(shown)
            hidden_1LD = base(input_ids=ids_1L, use_cache=False)[0]
            if not hidden_1LD.isfinite().all():
                raise MoesaicError(
                    "the model's hidden states are not finite numbers: its weights are "
                    "damaged; convert it again"
                )
            shown = max(0, shown - ids_1L.shape[1])
            if progress is not None:
                progress(ids_1L.numel())
    layers = [watcher.finish(len(ids_T)) for watcher in watchers]
    return Pass(source, len(ids_T), words, layers)


def most_shown(model: Any) -> int:
    """As many tokens as a window holds, which are the ones shown at most."""
    return min(SHOWN_TOKENS, WINDOW, context_of(model.config))


def _watchers(ffns: FFNs) -> list[_Watcher]:
    """One for each layer that has a replacement in it."""
    watchers = []
    for number, layer in enumerate(ffns.layers):
        whole = _whole(ffns, number)
        parts = _outermost(layer)
        if parts:
            watcher = _Watcher(number, layer, whole, parts)
            watchers.append(watcher)
    return watchers


def _whole(ffns: Any, layer: int) -> MoesaicReplacement | None:
    """What stands for the layer's whole FFN, or for its experts."""
    try:
        module = ffns.replaced(layer)
    except AttributeError:  # a layer without an FFN, as hybrids have
        return None
    return module if isinstance(module, MoesaicReplacement) else None


def _outermost(layer: nn.Module) -> dict[str, MoesaicReplacement]:
    """The layer's replacements by path, without those inside others."""
    found: dict[str, MoesaicReplacement] = {}
    for path, module in layer.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, MoesaicReplacement) and not inside:
            found[path] = module
    return found


@contextmanager
def _hooked(watchers: list[_Watcher]) -> Iterator[None]:
    handles = []
    for watcher in watchers:
        handles += watcher.hooks()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watcher:
    """Collects what one layer does, call by call."""

    def __init__(
        self,
        number: int,
        layer: nn.Module,
        whole: MoesaicReplacement | None,
        parts: dict[str, MoesaicReplacement],
    ):
        self.layer = layer
        self.whole = whole
        self.parts = parts if whole is None else {"": whole}
        self.result = LayerPass(number)
        self.runs: dict[
            str, Tensor
        ] = {}  # of each part, summed over tokens (U,)
        self.marks_F: Tensor | None = None
        self.shown = 0
        self.stream_S = torch.empty(0)
        self.shares: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # of a part: ran, kept

    def begin(self, shown: int) -> None:
        """A window comes, of which so many tokens are shown."""
        self.shown = shown
        self.shares = {}

    def hooks(self) -> list[Any]:
        handles = [
            self.layer.register_forward_pre_hook(
                self._see_stream, with_kwargs=True
            ),
            self.layer.register_forward_hook(self._end_layer),
        ]
        for path, part in self.parts.items():
            see = self._seer(path)
            handles.append(part.register_forward_hook(see, with_kwargs=True))
        return handles

    def _see_stream(self, layer: Any, inputs: Any, named: Any) -> None:
        stream = inputs[0] if inputs else named["hidden_states"]
        shown_SD = stream.flatten(0, -2)[: self.shown].float()
        self.stream_S = shown_SD.norm(dim=1).clamp(min=1e-20)

    def _seer(self, path: str) -> Callable[..., None]:
        def see(part: Any, inputs: Any, named: Any, output: Any) -> None:
            tensors = [*inputs, *named.values()]
            self._see(path, part, tensors, output)

        return see

    def _see(
        self,
        path: str,
        part: MoesaicReplacement,
        inputs: list[Tensor],
        output: Tensor,
    ) -> None:
        """One call of a replacement."""
        x_TD = inputs[0].flatten(0, -2)
        if part is self.whole:
            shown_SD = output.flatten(0, -2)[: self.shown].float()
            added_S = shown_SD.norm(dim=1) / self.stream_S
            self.result.cells.added += _rounded(added_S, 4)
            self._count_marks(part.hidden(x_TD))
        found = part.units(*inputs)
        if found is None:
            return
        runs_TU, added_TU = found
        self.result.unit = part.unit
        summed_U = runs_TU.sum(0)
        self.runs[path] = self.runs.get(path, 0) + summed_U
        runs_SU = runs_TU[: self.shown]
        energy_SU = added_TU[: self.shown].float().square()
        kept_S = (energy_SU * runs_SU).sum(1) / energy_SU.sum(1).clamp(1e-30)
        ran_S = runs_SU.sum(1)
        if part is self.whole:
            self._keep(ran_S, kept_S)
            self._list_units(runs_SU, added_TU[: self.shown])
        else:
            self.shares[path] = (runs_SU.float().mean(1), kept_S)

    def _keep(self, ran_S: Tensor, kept_S: Tensor) -> None:
        self.result.cells.ran += ran_S.tolist()
        self.result.cells.kept += _rounded(kept_S, 3)

    def _list_units(self, runs_SU: Tensor, added_SU: Tensor) -> None:
        """The strongest units of each shown token."""
        share_SU = added_SU.float() / self.stream_S[:, None]
        count = min(LISTED_UNITS, share_SU.shape[1])
        strongest = share_SU.topk(count, dim=1)
        runs_SK = runs_SU.gather(1, strongest.indices)
        unit_SK = torch.where(
            runs_SK, strongest.indices, -1 - strongest.indices
        )
        permille_SK = (1000 * strongest.values).round().long()
        pairs_SK2 = torch.stack([unit_SK, permille_SK], dim=2)
        self.result.cells.units += pairs_SK2.flatten(1).tolist()

    def _end_layer(self, layer: Any, inputs: Any, output: Any) -> None:
        """Where a layer has several replacements, each is a unit of its own."""
        if not self.shares or self.shown == 0:
            return
        ran_SU = torch.stack([ran for ran, _ in self.shares.values()], dim=1)
        kept_SU = torch.stack([kept for _, kept in self.shares.values()], dim=1)
        self._keep(torch.full((len(ran_SU),), ran_SU.shape[1]), kept_SU.mean(1))
        numbers = range(ran_SU.shape[1])
        for row in (1000 * ran_SU).round().long().tolist():
            pairs = zip(numbers, row, strict=True)
            self.result.cells.units.append([n for pair in pairs for n in pair])

    def _count_marks(self, h_TF: Tensor | None) -> None:
        """How often each neuron is among the largest of a token."""
        if h_TF is None:
            return
        count = min(MARKS, h_TF.shape[1])
        marked_TK = h_TF.abs().topk(count, dim=1).indices
        marks_F = torch.bincount(marked_TK.flatten(), minlength=h_TF.shape[1])
        self.marks_F = (
            marks_F if self.marks_F is None else self.marks_F + marks_F
        )

    def finish(self, tokens: int) -> LayerPass:
        """What was seen, as plain numbers."""
        result = self.result
        if self.whole is None:
            result.names = list(self.runs)
            means = [
                runs_U.float().mean()[None] / tokens
                for runs_U in self.runs.values()
            ]
            result.rates = _rounded(torch.cat(means), 4) if means else []
        elif self.runs:
            result.rates = _rounded(self.runs[""].float() / tokens, 4)
        if self.marks_F is not None:
            bins_F = self.marks_F.float() / tokens / HIGHEST_RATE * RATE_BINS
            bins_F = bins_F.long().clamp(max=RATE_BINS)
            counts = torch.bincount(bins_F, minlength=RATE_BINS + 1)
            result.neuron_rates = counts.tolist()
        return result


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
