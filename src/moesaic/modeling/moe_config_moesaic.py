"""What a converted model's `config.json` says under "moesaic", as types.

Leaf: this file is copied beside the weights, so it imports nothing but Python's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

FORMAT = 2
# Of the neurons that run for a token: below it, all of them lose more (docs/method.md).
ALL_FROM = 0.5
# Of routers that choose single neurons.
NEURON_KINDS = ("gates", "gates-alone", "copies")
ROUTER_KINDS = (
    "linear",
    "quadratic",
    "neuron-copies",
    "mlp",
    "unit-mlp",
    "hash",
    "embedding",
    "prompt",
    *NEURON_KINDS,
)
# The routers that go with a replacement; those of experts have all the others.
ROUTERS_OF = {
    "neurons": NEURON_KINDS,
    "int8-neurons": ("copies",),
    "prompt-neurons": ("prompt",),
}
COPY_BITS = (2, 3, 4)
EXACT_FROM = 2 / 3  # of a layer's neurons (docs/log.md, 2026-11-22)
CHOOSERS = ("topk", "threshold")
REPLACEMENT_KINDS = (
    "experts",
    "experts-with-means",
    "neurons",
    "int8-neurons",
    "prompt-neurons",
)
LINEAR_KINDS = ("thresholded",)
CONVERT_AGAIN = (
    "was written by another version of moesaic, in a form that this one does not read; "
    "convert the dense model again: moesaic convert {base} --output DIR"
)


class ConfigError(ValueError):
    """A configuration that is damaged, contradicts itself, or is of an older form."""


@dataclass(frozen=True)
class Sizes:
    """Neurons of one FFN: shared, of each routed expert, and left out for good.

    Index lists of experts may overlap, so `intermediate` is the dense FFN's own width
    where it is given, and the sum of the parts where it is not.
    """

    shared: int
    expert: int
    num_routed: int
    num_active: int
    intermediate: int | None = None

    @property
    def stored(self) -> int:
        """Neurons that the replacement holds."""
        return self.shared + self.num_routed * self.expert

    @property
    def total(self) -> int:
        """Neurons of the dense FFN."""
        return self.stored if self.intermediate is None else self.intermediate

    @property
    def active(self) -> int:
        """Neurons computed for a token, on average."""
        return self.shared + self.num_active * self.expert

    @property
    def padded(self) -> int:
        """Neurons of a routed expert as stored: whole rows of 16 bytes."""
        return padded(self.expert)

    def wrong(self) -> str | None:
        """The first field whose value makes no sense."""
        for name in ("shared", "expert", "num_routed", "num_active"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                return name
        if self.num_routed and not self.expert:
            return "expert"
        fewest = min(self.num_routed, 1)
        if not fewest <= self.num_active <= self.num_routed:
            return "num_active"
        if type(self.total) is not int or self.active > self.total:
            return "intermediate"
        return None


@dataclass(frozen=True)
class RouterConfig:
    """How experts are scored, and how many of them run.

    `kind` is what the router computes: a matrix product with the input ("linear"), the
    same with products of C `directions` appended ("quadratic"), copies of one neuron
    per expert ("neuron-copies"), two matrices with tanh between them ("mlp", or
    "unit-mlp" on inputs of unit length), a hash of the token's id ("hash"), a matrix
    product with the token's embedding ("embedding"), the FFN's own gates and a stand-in
    for W_up of rank `directions` ("gates"), those gates without one ("gates-alone"), or
    copies of W_gate and W_up in a few `bits` a weight ("copies"); of the neurons that
    run, the share `exact` reads W_gate and W_up themselves, and more where more than
    EXACT_FROM of all run. With "prompt" the first `prompt` tokens of a sequence choose
    (0: all that are given at once). `chooser` is "topk" (the K best) or "threshold"
    (all above it, at most `cap`). `absolute` ranks by the absolute value of scores.
    """

    kind: str
    chooser: str
    directions: int = 0
    absolute: bool = False
    cap: int | None = None
    bits: int | None = None
    exact: float | None = None
    prompt: int | None = None

    def num_exact(self, sizes: Sizes) -> int:
        """Neurons that read their exact rows; all of them where none is skipped.

        A budget for more neurons than EXACT_FROM of all is better spent on exact rows:
        from there the share grows in a straight line, up to 1 where all run.
        """
        if self.exact is None:
            return sizes.num_active
        running = sizes.num_active / sizes.num_routed
        beyond = max(0.0, running - EXACT_FROM) / (1 - EXACT_FROM)
        share = self.exact + (1 - self.exact) * beyond
        return round(share * sizes.num_active)

    @property
    def is_matrix(self) -> bool:
        """Whether scores are a matrix product with the input, as stock routers' are."""
        return self.kind == "linear"

    @property
    def fixed_count(self) -> bool:
        """Whether every token runs the same number of experts."""
        return self.chooser == "topk"

    def wrong(self, hidden_size: int) -> str | None:
        """The first field whose value makes no sense."""
        if self.kind not in ROUTER_KINDS:
            return "kind"
        if self.chooser not in CHOOSERS:
            return "chooser"
        if not is_count(self.directions) or self.directions > hidden_size:
            return "directions"
        if not is_switch(self.absolute):
            return "absolute"
        if self.cap is not None and not (is_count(self.cap) and self.cap):
            return "cap"
        if (self.prompt is not None) != (self.kind == "prompt"):
            return "prompt"
        if self.prompt is not None and not is_count(self.prompt):
            return "prompt"
        if self.kind != "copies":
            unused = (self.bits, self.exact) == (None, None)
            return None if unused else "bits"
        if type(self.bits) is not int or self.bits not in COPY_BITS:
            return "bits"
        is_share = isinstance(self.exact, float) and 0 <= self.exact <= 1
        return None if is_share else "exact"


@dataclass(frozen=True)
class BlockConfig:
    """What all replacements of a model have in common.

    `replacement` names the class, of REPLACEMENT_KINDS ("experts-with-means": those
    that do not run put out their mean). `gated`, `bias` and
    `activation` are the dense FFN's; `output_bias` says whether the replacement adds
    one (the FFN's, or a repair's intercept). Without `router` nothing is routed. With
    `all_in_prompts` tokens that are read at once run all neurons, where at least
    ALL_FROM of them run for a token.
    """

    replacement: str
    hidden_size: int
    gated: bool
    bias: bool
    activation: str
    output_bias: bool
    router: RouterConfig | None = None
    intermediate_size: int = 0  # of the dense FFN
    all_in_prompts: bool = False

    def all_run_in_prompts(self, sizes: Sizes) -> bool:
        """Whether a layer of these sizes runs all neurons for a prompt."""
        least = ALL_FROM * sizes.num_routed
        return self.all_in_prompts and sizes.num_active >= least

    @property
    def matrices(self) -> int:
        """Rows of weight matrices that belong to one neuron."""
        return 3 if self.gated else 2

    def wrong(self) -> str | None:
        """The first field whose value makes no sense."""
        if self.replacement not in REPLACEMENT_KINDS:
            return "replacement"
        for name in ("gated", "bias", "output_bias", "all_in_prompts"):
            if not is_switch(getattr(self, name)):
                return name
        if self.router is None:
            return None if self.replacement == "experts" else "router"
        wrong = self.router.wrong(self.hidden_size)
        if wrong is not None:
            return f"router {wrong}"
        own = ROUTERS_OF.get(self.replacement)
        if own is None:
            of_others = [
                kind for kinds in ROUTERS_OF.values() for kind in kinds
            ]
            return "router kind" if self.router.kind in of_others else None
        if self.router.kind not in own:
            return "router kind"
        if self.router.kind in NEURON_KINDS and not self.gated:
            return "router kind"
        return None


@dataclass(frozen=True)
class LinearConfig:
    """Linear layers that were replaced, one by one, inside FFNs or outside.

    `replacement` names the class: "thresholded". `paths` lead from the base model to
    the layers, with `{}` for the decoder layer. `share` of the weights is used for a
    token, on average; `shares` holds, by decoder layer, those of each path where they
    differ. The first `dense_start` of the tokens of a call skip nothing.
    """

    replacement: str
    paths: tuple[str, ...]
    share: float
    shares: dict[str, list[float]] = field(default_factory=dict)
    dense_start: float = 0.0

    def share_of(self, layer: int, path: str) -> float:
        """The share of one linear layer's weights."""
        shares = self.shares.get(str(layer))
        if shares is None:
            return self.share
        return shares[self.paths.index(path)]

    @property
    def mean_share(self) -> float:
        """The mean share of a linear layer, each counted once whatever its size."""
        if not self.shares:
            return self.share
        shares = [share for row in self.shares.values() for share in row]
        return sum(shares) / len(shares)

    def wrong(self) -> str | None:
        """The first field whose value makes no sense."""
        if self.replacement not in LINEAR_KINDS:
            return "linears replacement"
        if not self.paths:
            return "linears paths"
        if not all("{}" in path for path in self.paths):
            return "linears paths"
        if not 0 < self.share <= 1:
            return "linears share"
        if not 0 <= self.dense_start <= 1:
            return "linears dense_start"
        for shares in self.shares.values():
            if len(shares) != len(self.paths):
                return "linears shares"
            if not all(0 < share <= 1 for share in shares):
                return "linears shares"
        return None


@dataclass(frozen=True)
class OuterConfig:
    """The mixture that the model was before, whose experts were converted one by one.

    `num_experts` of a layer, `num_active` of them run for a token, in `num_layers`
    layers. `chosen` (None: all) and `min_tokens` are what the user asked for; `whole`
    names, by layer, the experts that stay as they were. `shared_path` and
    `shared_sizes` are of the shared expert that every token runs, where it was
    converted as one more FFN.
    """

    num_experts: int
    num_active: int
    num_layers: int
    min_tokens: int
    chosen: tuple[int, ...] | None = None
    whole: dict[str, list[int]] = field(default_factory=dict)
    shared_path: str | None = None
    shared_sizes: Sizes | None = None

    def whole_experts(self, layer: int) -> list[int]:
        """The experts of a layer that stay as they were."""
        return self.whole.get(str(layer), [])

    def wrong(self, layers: tuple[int, ...], depth: int) -> str | None:
        """The first field whose value makes no sense."""
        experts = self.num_experts
        active = self.num_active
        if type(experts) is not int or experts < 1:
            return "outer num_experts"
        if type(active) is not int or not 1 <= active <= experts:
            return "outer num_active"
        if not len(layers) <= self.num_layers <= depth:
            return "outer num_layers"
        layer_names = {str(layer) for layer in layers}
        all_experts = set(range(experts))
        for layer, whole in self.whole.items():
            ascending = sorted(set(whole))
            if layer not in layer_names or whole != ascending:
                return "outer whole"
            if not set(whole) <= all_experts:
                return "outer whole"
        path = self.shared_path
        sizes = self.shared_sizes
        if (path is None) != (sizes is None):
            return "outer shared_sizes"
        if sizes is not None and sizes.wrong() is not None:
            return "outer shared_sizes"
        if path is not None and "{}" not in path:
            return "outer shared_path"
        return None


@dataclass(frozen=True)
class MoEConfig:
    """How a model was converted, and all that is needed to build it again.

    - `method`: its name, its settings and one sentence about it
    - `layout`: SxAyEz, of the mean layer where budgets differ
    - `path` of the FFN from the base model, with `{}` for the layer; `identities` are
      modules that the replacement makes superfluous
    - `layers`: those that were converted; `sizes`: of each of them
    - `linears`: only where linear layers were replaced
    - `outer`: only where the model was a mixture before
    - `changes`: only where the result is a model of the dense one's family: what its
      configuration says otherwise. Nothing else of this is needed to build it then,
      unless `shortcuts`: matrices stand beside attention and FFN of every layer
    - `base_model`, `source`, `calibration`, `versions`, `finetune`: how it was made
    """

    method: dict[str, Any]
    layout: str
    block: BlockConfig
    path: str
    identities: tuple[str, ...]
    layers: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    outer: OuterConfig | None = None
    linears: LinearConfig | None = None
    changes: dict[str, Any] | None = None
    shortcuts: bool = False
    base_model: str = ""
    source: str | None = None
    calibration: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    finetune: dict[str, Any] | None = None
    format: int = FORMAT

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.method["name"])

    @property
    def is_ordinary(self) -> bool:
        """Whether the result is a model of the dense one's own family."""
        return self.changes is not None and not self.shortcuts

    @property
    def router(self) -> RouterConfig | None:
        return self.block.router

    @property
    def first_sizes(self) -> Sizes:
        """The sizes of the first converted layer; of a dense one where none is.

        Layers differ in `num_active` at most, unless a method says otherwise.
        """
        if not self.sizes:
            return Sizes(self.block.intermediate_size, 0, 0, 0)
        return self.sizes[0]

    def sizes_of(self, layer: int) -> Sizes:
        """The sizes of one converted layer."""
        return self.sizes[self.layers.index(layer)]

    @property
    def uniform_sizes(self) -> Sizes | None:
        """The sizes of all layers where they are the same."""
        first = self.first_sizes
        uniform = all(sizes == first for sizes in self.sizes)
        return first if uniform else None

    @property
    def budgets(self) -> list[int]:
        """Routed experts per token by layer, where layers differ; else empty."""
        active = [sizes.num_active for sizes in self.sizes]
        return active if len(set(active)) > 1 else []

    def replacement_path(self, layer: int) -> str:
        """Where, from the base model, the replacement of a layer stands."""
        return self.path.format(layer)

    def with_budgets(self, budgets: tuple[int, ...]) -> MoEConfig:
        """The same with so many routed experts per token in each converted layer.

        Neurons that are kept, where none is routed.
        """
        all_sizes = []
        for sizes, budget in zip(self.sizes, budgets, strict=True):
            if sizes.num_routed:
                budgeted = replace(sizes, num_active=budget)
            else:
                budgeted = replace(sizes, shared=budget)
            all_sizes.append(budgeted)
        return replace(self, sizes=tuple(all_sizes))

    def with_sizes(self, sizes: tuple[Sizes, ...]) -> MoEConfig:
        """The same with these sizes of the converted layers."""
        return replace(self, sizes=sizes)

    def with_shares(self, layer: int, shares: list[float]) -> MoEConfig:
        """The same with these shares of a decoder layer's linear layers; none: equal."""
        if self.linears is None or not shares:
            return self
        all_shares = self.linears.shares | {str(layer): list(shares)}
        linears = replace(self.linears, shares=all_shares)
        return replace(self, linears=linears)

    def with_whole(self, layer: int, experts: list[int]) -> MoEConfig:
        """The same where these experts of a layer stay as they were."""
        if self.outer is None:
            return self
        whole = dict(self.outer.whole)
        whole.pop(str(layer), None)
        if experts:
            whole[str(layer)] = sorted(experts)
        outer = replace(self.outer, whole=whole)
        return replace(self, outer=outer)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: lists for tuples, nothing where nothing was given."""
        values = asdict(self)
        values["sizes"] = [asdict(sizes) for sizes in self.sizes]
        given = {
            key: value for key, value in values.items() if value is not None
        }
        return _plain(given)

    def provenance(self) -> dict[str, Any]:
        """How the model was made, for a configuration that is not ours."""
        names = (
            "method",
            "layout",
            "base_model",
            "source",
            "calibration",
            "versions",
        )
        values = self.to_dict()
        return {name: values[name] for name in names if name in values}

    @classmethod
    def from_dict(cls, values: Any) -> MoEConfig:
        """Reads what `to_dict` wrote.

        Raises ConfigError where it is damaged or of an older form.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"is damaged: moesaic holds {values!r}")
        if values.get("format") != FORMAT:
            base = values.get("base_model") or "MODEL"
            message = CONVERT_AGAIN.format(base=base)
            raise ConfigError(message)
        try:
            typed = _typed(values)
            return cls(**typed)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"is damaged ({error!r})") from error

    def check(self, hidden_size: int, depth: int) -> None:
        """Raises ConfigError where values make no sense or contradict each other."""
        try:
            wrong = self._wrong(hidden_size, depth)
        except (
            TypeError,
            AttributeError,
            ValueError,
            IndexError,
            KeyError,
        ) as error:
            raise ConfigError(f"is damaged ({error!r})") from error
        if wrong is not None:
            raise ConfigError(
                f"contradicts itself: {wrong} does not fit the layout {self.layout}; "
                "fetch the model again, or convert it again"
            )

    def _wrong(self, hidden_size: int, depth: int) -> str | None:
        if self.block.hidden_size != hidden_size:
            return "hidden_size"
        wrong = self.block.wrong()
        if wrong is not None:
            return wrong
        if not is_switch(self.shortcuts):
            return "shortcuts"
        if not self.layers and self.linears is None and not self.shortcuts:
            return "layers"
        ascending = sorted(set(self.layers))
        if list(self.layers) != ascending:
            return "layers"
        if self.linears is not None:
            wrong = self.linears.wrong()
            if wrong is not None:
                return wrong
        if not set(self.layers) <= set(range(depth)):
            return "layers"
        paths = (self.path, *self.identities)
        if not all("{}" in path for path in paths):
            return "path"
        if len(self.sizes) != len(self.layers):
            return "sizes"
        for sizes in self.sizes:
            wrong = self._wrong_sizes(sizes)
            if wrong is not None:
                return wrong
        if self.outer is None:
            return None
        if self.budgets:
            return "num_active"
        return self.outer.wrong(self.layers, depth)

    def _wrong_sizes(self, sizes: Sizes) -> str | None:
        wrong = sizes.wrong()
        if wrong is not None:
            return wrong
        has_router = self.router is not None
        has_experts = sizes.num_routed != 0
        if has_router != has_experts:
            return "num_routed"
        if sizes.total != self.first_sizes.total:
            return "intermediate"
        if self.block.replacement in ROUTERS_OF:
            single_neurons = sizes.expert == 1
            if not single_neurons or sizes.shared != 0:
                return "expert"
        return None


def is_count(value: object) -> bool:
    """Whether a value that was read is a whole number of at least 0."""
    return type(value) is int and value >= 0


def is_switch(value: object) -> bool:
    """Whether a value that was read is true or false."""
    return type(value) is bool


def padded(count: int) -> int:
    """Rounded up to a multiple of 8."""
    groups_of_8 = -(-count // 8)
    return groups_of_8 * 8


def _plain(value: Any) -> Any:
    """Lists for tuples, all the way down."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of MoEConfig from plain values. Raises KeyError for one that lacks."""
    names = {field.name for field in fields(MoEConfig)}
    typed = {key: value for key, value in values.items() if key in names}
    for text in (values["layout"], values["method"]["name"]):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is no text")
    block = dict(values["block"])
    if block["router"] is not None:
        block["router"] = RouterConfig(**block["router"])
    typed["block"] = BlockConfig(**block)
    typed["layers"] = tuple(values["layers"])
    typed["identities"] = tuple(values["identities"])
    all_sizes = [Sizes(**sizes) for sizes in values["sizes"]]
    typed["sizes"] = tuple(all_sizes)
    if values.get("linears") is not None:
        linears = dict(values["linears"])
        linears["paths"] = tuple(linears["paths"])
        typed["linears"] = LinearConfig(**linears)
    if values.get("outer") is not None:
        typed["outer"] = _typed_outer(values["outer"])
    return typed


def _typed_outer(values: dict[str, Any]) -> OuterConfig:
    outer = dict(values)
    chosen = outer["chosen"]
    if chosen is not None:
        outer["chosen"] = tuple(chosen)
    shared_sizes = outer["shared_sizes"]
    if shared_sizes is not None:
        outer["shared_sizes"] = Sizes(**shared_sizes)
    return OuterConfig(**outer)
