"""The seam: what a method is, what it is told, and what it returns.

A method is one published way (or one of ours) to make a dense model do less work per
token. It is one class in one file: a frozen dataclass whose fields are its settings.
docs/add_a_method.md shows the whole of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from moesaic.errors import MoesaicError, unknown
from moesaic.layout import GRAINS, Layout, layouts_for
from moesaic.methods.contents import Description
from moesaic.modeling import (
    BlockConfig,
    LinearConfig,
    MoEConfig,
    OuterConfig,
    RouterConfig,
    Sizes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from torch import nn

    from moesaic.calibration.ffn_inputs import FFNInputs
    from moesaic.calibration.linear_trial import LinearTrial
    from moesaic.calibration.statistics import StatisticsKind
    from moesaic.families import DenseFFN

USUAL_SPARSITY = 0.25
LAYER_BUDGETS = ("uniform", "gradient")
LINEARS = ("all", "ffn")
REPAIRS = ("least-squares", "mean", "none")
UNDO_DRIFT_HELP = (
    "How much of the drift from the dense model's hidden states the repair takes back; "
    "0: none, 1: all that it can."
)


@dataclass(frozen=True)
class FFNShape:
    """What a configuration tells of one FFN."""

    hidden_size: int
    intermediate_size: int
    gated: bool
    bias: bool
    output_bias: bool
    activation: str


@dataclass(frozen=True)
class OuterShape:
    """Of a model that is a mixture already: its experts, and what the user asked for.

    `chosen` are the experts to convert (None: all), `min_tokens` what they must see.
    `shared_path` and `shared_size` are of the expert that every token runs, if any.
    """

    num_experts: int
    num_active: int
    num_layers: int
    min_tokens: int
    chosen: tuple[int, ...] | None = None
    shared_path: str | None = None
    shared_size: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """What config.json tells of a model: one FFN's shape, and where FFNs stand.

    `layers` are those to convert. `path` leads from the base model to an FFN, with
    `{}` for the layer; `identities` to modules that a replacement makes superfluous,
    `linears` to all linear layers. `config` is all that config.json says. `domains`
    is the number of calibration texts.
    """

    name: str
    ffn: FFNShape
    layers: tuple[int, ...]
    path: str
    identities: tuple[str, ...] = ()
    outer: OuterShape | None = None
    linears: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    domains: int = 1

    def linears_where(self, where: str) -> tuple[str, ...]:
        """All linear layers, or those of FFNs alone: `where` is one of LINEARS."""
        if where == "all":
            return self.linears
        ffn_paths = (self.path, *self.identities)
        inside = f"{self.path}."
        return tuple(
            path
            for path in self.linears
            if path in ffn_paths or path.startswith(inside)
        )


@dataclass(frozen=True)
class Budget:
    """How much may run: a layout, or a share of the neurons that a token skips.

    `grain` (coarse, medium, fine) limits how many experts a sparsity may lead to. Raises
    MoesaicError for another one.
    """

    layout: Layout | None = None
    sparsity: float | None = None
    grain: str = "medium"

    def __post_init__(self) -> None:
        if self.grain not in GRAINS:
            raise unknown("grain", self.grain, GRAINS)

    @property
    def skipped(self) -> float:
        """The sparsity that was asked for, or the usual one."""
        if self.sparsity is None:
            return USUAL_SPARSITY
        return self.sparsity


def setting(
    default: Any,
    help: str,
    least: int | None = None,
    choices: tuple[str, ...] | None = None,
    most: int | None = None,
) -> Any:
    """A field of a method: its default, what it means, and which values it takes."""
    metadata = {"help": help, "least": least, "choices": choices, "most": most}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Method(ABC):
    """One way to make a dense model do less work per token.

    `needs` names what it wants besides the calibration text's activations:
    "gradients" (the whole model on one device), "token ids" or "domains" (texts of
    several kinds; `calibration.domain_N` says which a window comes from). `saves` is
    False for a reference, which no model can hold.
    """

    description: ClassVar[Description]
    needs: ClassVar[frozenset[str]] = frozenset()
    saves: ClassVar[bool] = True
    file_digest: ClassVar[str | None] = None  # of the file of a user's method

    def __post_init__(self) -> None:
        for row in fields(self):
            if row.metadata:
                self._check_setting(row.name, row.default, row.metadata)

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def about(self) -> str:
        return self.description.about

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, by name."""
        names = [row.name for row in fields(self)]
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """What the configuration of a converted model keeps.

        Of a user's file its digest too: what was made by other code is not gone on with.
        """
        values = {
            "name": self.name,
            "about": self.about,
            "settings": self.settings,
        }
        if self.file_digest is not None:
            values["file_digest"] = self.file_digest
        return values

    @abstractmethod
    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        """How the budget can be spent on such a model, the usual way first.

        Several plans are tried on a few layers, and the best is taken. Raises
        MoesaicError, with the reason, for a model or budget that the method is not for.
        """

    @abstractmethod
    def words(self, moe: MoEConfig) -> str:
        """The plan in words, for tables and cards."""

    @abstractmethod
    def convert(self, model: Any, calibration: Any, plan: Any, run: Any) -> Any:
        """Converts a model in memory; `run` loops, measures, saves and resumes."""

    # Whether weights are fitted to tokens, so that others must be held out to judge.
    fits_weights: ClassVar[bool] = False

    def sparsity_of(self, budget: Budget) -> float:
        """The share to skip. Raises MoesaicError for a layout, and outside [0, 1)."""
        if budget.layout is not None:
            raise MoesaicError(
                f"method {self.name!r} has no experts, so no layout {budget.layout}; "
                "give a sparsity"
            )
        sparsity = budget.skipped
        if not 0 <= sparsity < 1:
            raise MoesaicError(
                f"sparsity {sparsity} is outside [0, 1); 0.25 skips a quarter"
            )
        return sparsity

    def _check_setting(
        self, name: str, default: Any, metadata: Mapping[str, Any]
    ) -> None:
        """Raises MoesaicError for a value that the setting does not take."""
        value = getattr(self, name)
        choices = metadata["choices"]
        if choices is not None:
            if not isinstance(value, str) or value not in choices:
                raise unknown(name, str(value), choices)
            return
        if isinstance(default, bool):
            if type(value) is not bool:
                raise self._bad_setting(name, "it is true or false")
            return
        if value is None and default is None:
            return
        if isinstance(default, str):
            if not isinstance(value, str):
                raise self._bad_setting(name, "it is text")
            return
        least = metadata["least"]
        is_real = isinstance(default, float)
        rule = "it must be a number" if is_real else "it must be a whole number"
        if least is not None:
            rule = f"{rule} >= {least}"
        most = metadata["most"]
        if most is not None:
            rule = f"{rule} and <= {most}"
        kinds = (int, float) if is_real else (int,)
        if type(value) not in kinds or not math.isfinite(value):
            raise self._bad_setting(name, rule)
        if least is not None and value < least:
            raise self._bad_setting(name, rule)
        if most is not None and value > most:
            raise self._bad_setting(name, rule)

    def _bad_setting(self, name: str, rule: str) -> MoesaicError:
        value = getattr(self, name)
        return MoesaicError(
            f"method {self.name!r}: {name} is {value!r}; {rule}"
        )


@dataclass(frozen=True)
class FFNMethod(Method):
    """A method that replaces FFNs, one by one; or every expert of a mixture.

    A subclass defines `convert_ffn` and `block`, and, where its sizes are not those of
    a layout, `sizes`.
    """

    # Whether the budget's grain decides how many experts there are, where `experts` does not.
    takes_grain: ClassVar[bool] = True
    # The numbers of experts that a published method has, where they are part of it.
    experts: ClassVar[int | None] = None
    shared_experts: ClassVar[int | None] = None
    # Whether several layouts of one sparsity are worth trying.
    searches_layouts: ClassVar[bool] = False
    # How layers share a budget; "own": as `sizes_of_layers` says.
    layer_budgets: ClassVar[str] = "uniform"
    # How much of the drift from the dense model's hidden states its repair takes back.
    # Above 0 the run follows these states beside the converted model's own.
    undo_drift: ClassVar[float] = 0.0

    @property
    def undoes_drift(self) -> bool:
        """Whether it repairs anything, and takes drift back with that."""
        return self.undo_drift > 0

    @abstractmethod
    def block(self, ffn: FFNShape) -> BlockConfig:
        """What all replacements have in common."""

    @abstractmethod
    def convert_ffn(
        self,
        weights: DenseFFN,
        inputs: FFNInputs,
        sizes: Sizes,
        generator: np.random.Generator,
    ) -> nn.Module:
        """The module that stands in for one FFN."""

    def statistics_kinds(self) -> tuple[StatisticsKind, ...]:
        """The statistics it will ask its inputs for.

        Of the experts of a mixture they are computed for many at once.
        """
        return ()

    def sizes(self, layout: Layout, intermediate_size: int) -> Sizes:
        """Neurons of one FFN's parts under a layout."""
        return layout.sizes(intermediate_size)

    def sizes_of_layers(
        self, layers: Iterable[tuple[DenseFFN, FFNInputs]], sizes: Sizes
    ) -> list[Sizes]:
        """Sizes of each layer, where all have to be seen first.

        `layers` gives every FFN with its inputs in the dense model, one at a time;
        `sizes` are those of equal budgets. Asked for where `layer_budgets` is "own".
        """
        return [sizes for _ in layers]

    def layouts(self, shape: ModelShape, budget: Budget) -> list[Layout]:
        """The layouts that serve a budget, the usual one first."""
        if budget.layout is not None:
            return [budget.layout]
        neurons = shape.ffn.intermediate_size
        layouts = layouts_for(
            budget.skipped,
            neurons,
            budget.grain,
            self.experts,
            self.shared_experts,
        )
        # A mixture's experts are many: a search would convert each for every layout.
        if self.searches_layouts and shape.outer is None:
            return layouts
        return layouts[:1]

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        """One plan a layout, with the same sizes in every layer."""
        return [
            self.plan(shape, layout) for layout in self.layouts(shape, budget)
        ]

    def plan(self, shape: ModelShape, layout: Layout) -> MoEConfig:
        """What the configuration of the result will say."""
        neurons = shape.ffn.intermediate_size
        sizes = self.sizes(layout, neurons)
        sizes_of_layers = (sizes,) * len(shape.layers)
        return MoEConfig(
            method=self.to_dict(),
            layout=str(layout),
            block=self.block(shape.ffn),
            path=shape.path,
            identities=shape.identities,
            layers=shape.layers,
            sizes=sizes_of_layers,
            outer=self._outer(shape.outer, layout),
        )

    def _outer(
        self, outer: OuterShape | None, layout: Layout
    ) -> OuterConfig | None:
        """What it says of a model that is a mixture already."""
        if outer is None:
            return None
        shared_path = None
        shared_sizes = None
        # With chosen experts only those are converted, and the shared one stays.
        if outer.shared_size is not None and outer.chosen is None:
            shared_path = outer.shared_path
            shared_sizes = self.sizes(layout, outer.shared_size)
        return OuterConfig(
            num_experts=outer.num_experts,
            num_active=outer.num_active,
            num_layers=outer.num_layers,
            min_tokens=outer.min_tokens,
            chosen=outer.chosen,
            shared_path=shared_path,
            shared_sizes=shared_sizes,
        )

    def words(self, moe: MoEConfig) -> str:
        total = moe.first_sizes.total
        widths = [sizes.active for sizes in moe.sizes]
        least = min(widths)
        most = max(widths)
        if least == most:
            return f"the best {least} of {total} neurons, no routing"
        mean = round(sum(widths) / len(widths))
        return (
            f"on average the best {mean} of {total} neurons ({least} to {most} in a "
            "layer), no routing"
        )

    def convert(self, model: Any, calibration: Any, plan: Any, run: Any) -> Any:
        """Replaces every FFN in turn, on inputs that passed the layers before it."""
        return run.replace_ffns(self)


@dataclass(frozen=True)
class LinearMethod(Method):
    """A method that replaces linear layers one by one, in FFNs and attention alike.

    A subclass defines `convert_linear`; `chosen_paths` where it leaves some as they
    are, and `replacement`, the class of modeling/linears_moesaic.py that it returns.
    `dense_start` of a prompt's tokens, from its first, skip nothing.
    """

    replacement: ClassVar[str] = "thresholded"
    dense_start: ClassVar[float] = 0.0

    @abstractmethod
    def convert_linear(
        self,
        weights: nn.Linear,
        inputs: FFNInputs,
        share: float,
        generator: np.random.Generator,
    ) -> nn.Module:
        """The module that stands in for one linear layer.

        `inputs` are those of this layer for all calibration tokens; `share` of its
        weights may be used for a token, on average.
        """

    def shares_of_layer(self, trial: LinearTrial, share: float) -> list[float]:
        """The share of each linear layer of a decoder layer; none where all are equal.

        Weighted by their sizes the mean is `share`.
        """
        return []

    def chosen_paths(self, shape: ModelShape) -> tuple[str, ...]:
        """The linear layers to replace."""
        return shape.linears

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        """One plan, for a share of the weights. Raises MoesaicError for a layout."""
        sparsity = self.sparsity_of(budget)
        refuse_mixture(self, shape, "replaces linear layers of dense models")
        paths = self.chosen_paths(shape)
        for path in paths:
            if path not in shape.linears:
                raise unknown(
                    f"linear layer of {shape.name}", path, shape.linears
                )
        if not paths:
            raise MoesaicError(
                f"{shape.name} has no linear layers that method {self.name!r} replaces"
            )
        share = 1 - sparsity
        linears = LinearConfig(
            self.replacement, paths, share, dense_start=self.dense_start
        )
        return [
            MoEConfig(
                method=self.to_dict(),
                layout=f"{100 * sparsity:.4g}% sparse",
                block=block_config(shape.ffn, None),
                path=shape.path,
                identities=shape.identities,
                layers=(),
                sizes=(),
                linears=linears,
            )
        ]

    def words(self, moe: MoEConfig) -> str:
        linears = moe.linears
        assert linears is not None
        count = len(linears.paths)
        words = f"{linears.share:.0%} of the inputs of {count} linear layers a layer"
        if linears.shares:
            words += ", not all alike"
        return words

    def convert(self, model: Any, calibration: Any, plan: Any, run: Any) -> Any:
        """Replaces every linear layer, one decoder layer after the other."""
        return run.replace_linears(self)


@dataclass(frozen=True)
class ModelMethod(Method):
    """A method whose result is a model of the same family: fewer blocks, or narrower.

    It is saved as such, and stock transformers loads it. A subclass defines `changes`
    and `convert`, which changes the model and its configuration in place and returns
    reports of layers, or none. `convert` puts new modules or parameters into places and
    leaves the dense tensors as they are: a comparison puts them back.
    """

    @abstractmethod
    def changes(self, shape: ModelShape, sparsity: float) -> dict[str, Any]:
        """What the configuration will say otherwise, `shape.config` being the dense one.

        Raises MoesaicError, with the reason, where the method cannot skip that much.
        """

    @abstractmethod
    def convert(
        self, model: Any, calibration: Any, plan: Any, run: Any
    ) -> list[Any]:
        """Changes the model and its configuration; `run` keeps what is costly."""

    def plans(self, shape: ModelShape, budget: Budget) -> list[MoEConfig]:
        """One plan, for a share of the model. Raises MoesaicError for a layout."""
        sparsity = self.sparsity_of(budget)
        changes = self.changes(shape, sparsity)
        return [
            MoEConfig(
                method=self.to_dict(),
                layout=f"{100 * sparsity:.4g}% removed",
                block=block_config(shape.ffn, None),
                path=shape.path,
                identities=(),
                layers=(),
                sizes=(),
                changes=changes,
            )
        ]

    def words(self, moe: MoEConfig) -> str:
        changes = moe.changes or {}
        parts = [
            f"{name} {value}"
            for name, value in changes.items()
            if isinstance(value, int)
        ]
        return ", ".join(parts) or "as it was"


def neuron_layout(budget: Budget, neurons: int) -> Layout:
    """The budget as so many of the neurons, whatever experts they stand in.

    Raises MoesaicError for a sparsity at which all neurons or none would run.
    """
    if budget.layout is not None:
        active = budget.layout.sizes(neurons).active
        return Layout(0, active, neurons)
    sparsity = budget.skipped
    if not 0 < sparsity < 1:
        raise MoesaicError(
            f"sparsity {sparsity} is outside (0, 1); 0.25 skips a quarter"
        )
    active = round((1 - sparsity) * neurons)
    if not 1 <= active < neurons:
        raise MoesaicError(
            f"sparsity {sparsity}: {active} of {neurons} neurons would run; at least 1 "
            "has to, and at least 1 not"
        )
    return Layout(0, active, neurons)


def refuse_mixture(method: Method, shape: ModelShape, why: str) -> None:
    """Raises MoesaicError for a model that is a mixture already, and says why."""
    if shape.outer is not None:
        raise MoesaicError(
            f"{shape.name} is a mixture of experts, and method {method.name!r} {why}; "
            "take another method"
        )


def refuse_without_gate(method: Method, shape: ModelShape) -> None:
    """Raises MoesaicError for FFNs without a gate."""
    if not shape.ffn.gated:
        raise MoesaicError(
            f"{shape.name} has FFNs without a gate, and method {method.name!r} goes by "
            "gates; take another method"
        )


def block_config(
    ffn: FFNShape,
    router: RouterConfig | None,
    output_bias: bool = False,
    replacement: str = "experts",
) -> BlockConfig:
    """The common part of replacements of such an FFN; `output_bias`: in any case."""
    return BlockConfig(
        replacement=replacement,
        hidden_size=ffn.hidden_size,
        gated=ffn.gated,
        bias=ffn.bias,
        activation=ffn.activation,
        output_bias=ffn.output_bias or output_bias,
        router=router,
        intermediate_size=ffn.intermediate_size,
    )


def shape_of(weights: DenseFFN) -> FFNShape:
    """The shape of an FFN whose weights are at hand."""
    return FFNShape(
        hidden_size=weights.up_FD.shape[1],
        intermediate_size=weights.intermediate_size,
        gated=weights.gated,
        bias=weights.up_bias_F is not None,
        output_bias=weights.down_bias_D is not None,
        activation=weights.activation,
    )
