"""Recipes: one ingredient per step. Every method is a row of RECIPES or a YAML file like one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from moesaic.errors import MoesaicError, unknown
from moesaic.parts.grouping import GROUPING
from moesaic.parts.importance import IMPORTANCE
from moesaic.parts.repair import REPAIRS
from moesaic.parts.routers import FITTED, ROUTERS

_INGREDIENTS: dict[str, Iterable[str]] = {
    "importance": IMPORTANCE,
    "grouping": GROUPING,
    "router": ROUTERS,
    "gating": ("topk", "threshold"),
    "repair": REPAIRS,
}
_LEAST = {
    "activation_top_k": 1,
    "kmeans_rounds": 1,
    "reassign_rounds": 0,
    "features": 1,
    "up_steps": 0,
}


@dataclass(frozen=True)
class Recipe:
    """One choice per step of a conversion.

    `gating`: the K experts of largest score, or every expert above its own threshold, at most
    `cap`. `reassign_rounds` lets neurons move to the experts that a linear router picks when they
    are needed. `repair` refits the output vectors, with an output bias where `intercept`;
    `up_steps` of conjugate gradients then refit the rows of W_up, and it refits them once more.
    `layer_budgets` shares the mean number of experts per token unequally between layers.
    `features` are the directions of a quadratic router, or those that a router by gates has of
    W_up. `experts` is the number of experts that
    a published method has, where it is part of it. `normalise` profiles and routes with
    unit-length inputs and weight rows; `absolute` ranks experts by the absolute value of their
    scores.
    """

    name: str
    about: str
    importance: str
    grouping: str
    router: str
    gating: str = "topk"
    layer_budgets: bool = False
    repair: str = "none"
    intercept: bool = False
    up_steps: int = 0
    reassign_rounds: int = 0
    features: int = 24
    cap: int | None = None
    experts: int | None = None
    activation_top_k: int = 10
    kmeans_rounds: int = 20
    normalise: bool = False
    absolute: bool = False

    def __post_init__(self) -> None:
        for step, known in _INGREDIENTS.items():
            if (
                not isinstance(getattr(self, step), str)
                or getattr(self, step) not in known
            ):
                raise unknown(step, str(getattr(self, step)), known)
        if not isinstance(self.name, str) or not isinstance(self.about, str):
            raise MoesaicError(f"recipe {self.name!r}: name and about must be text")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise MoesaicError(
                    f"recipe {self.name!r}: {name} is {value!r}; it must be >= {least}"
                )
        for name in ("normalise", "absolute", "intercept", "layer_budgets"):
            if type(getattr(self, name)) is not bool:
                raise MoesaicError(
                    f"recipe {self.name!r}: {name} is {getattr(self, name)!r}; it is true or false"
                )
        for name in ("cap", "experts"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise MoesaicError(
                    f"recipe {self.name!r}: {name} is {value!r}; it must be >= 1"
                )
        for wrong, why in (
            (
                (self.grouping == "none") != (self.router == "none"),
                f"grouping {self.grouping!r} with router {self.router!r}; without groups there is "
                "nothing to route, so both are none or neither",
            ),
            (
                self.grouping == "neurons" and self.router not in ("oracle", "gates"),
                f"experts of one neuron are for the routers oracle and gates, not {self.router!r}",
            ),
            (
                self.router == "gates"
                and (self.grouping, self.gating, self.cap)
                != ("neurons", "threshold", None),
                "the router gates wants grouping neurons and gating threshold, without a cap",
            ),
            (
                self.normalise and self.importance != "rate",
                f"importance {self.importance!r} of a normalised FFN means nothing; use "
                "importance rate, or normalise: false",
            ),
            (
                self.intercept and self.repair == "none",
                "an intercept comes from a repair; choose one, or intercept: false",
            ),
            (
                self.up_steps > 0 and self.repair == "none",
                "rows of W_up are refitted between two repairs; choose one, or up_steps: 0",
            ),
            (
                self.cap is not None and self.gating != "threshold",
                "a cap limits threshold gating; top-k has none",
            ),
            (
                self.layer_budgets and self.gating != "threshold",
                "layers of different budgets need threshold gating: top-k has one K",
            ),
            (
                self.gating == "threshold" and self.router in ("none", "oracle"),
                f"threshold gating needs a router, not {self.router!r}",
            ),
        ):
            if wrong:
                raise MoesaicError(f"recipe {self.name!r}: {why}")

    @property
    def routed(self) -> bool:
        return self.grouping != "none"

    @property
    def fits(self) -> bool:
        """Whether weights are fitted to tokens, so that others must be held out to judge them."""
        return self.router in (*FITTED, "gates") or self.repair != "none"

    @property
    def samples_hidden(self) -> bool:
        """Whether grouping needs a sample of hidden states."""
        return self.grouping == "contribution-kmeans" or self.reassign_rounds > 0

    @property
    def marks_active(self) -> bool:
        """Whether the paper's binary matrix A is needed."""
        return (
            self.importance == "rate"
            or self.grouping == "balanced-kmeans"
            or self.router == "representative"
        )

    @property
    def statistics(self) -> dict[str, Any]:
        """What a profile is to hold besides sums, as `profile_ffn` is told."""
        return {
            "activation_top_k": self.activation_top_k if self.marks_active else None,
            "normalise": self.normalise,
            "gram": self.importance == "observability",
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_MOESAIC: dict[str, Any] = {
    "importance": "contribution",
    "grouping": "contribution-kmeans",
    "kmeans_rounds": 4,
    "reassign_rounds": 6,
    "repair": "least-squares",
}
_PAPER = ("rate", "balanced-kmeans", "representative")

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "moesaic",
            "linear router fitted to expert energies, least-squares repair; fits stock MoE "
            "architectures",
            router="linear",
            **_MOESAIC,
        ),
        Recipe(
            "moesaic-up",
            "as moesaic, with the rows of W_up refitted too: mostly loses less, takes longer",
            router="linear",
            up_steps=4,
            **_MOESAIC,
        ),
        Recipe(
            "moesaic-dynamic",
            "as moesaic, but a token runs as many experts as pass their thresholds, and the router "
            "reads products of 8 directions too",
            router="quadratic",
            features=8,
            gating="threshold",
            intercept=True,
            **_MOESAIC,
        ),
        Recipe(
            "moesaic-quadratic",
            "as moesaic-dynamic, with products of 24 directions",
            router="quadratic",
            gating="threshold",
            intercept=True,
            **_MOESAIC,
        ),
        Recipe(
            "moesaic-budgets",
            "as moesaic-dynamic, and layers run as many experts as are worth most there; takes "
            "about four times as long",
            router="quadratic",
            features=8,
            gating="threshold",
            layer_budgets=True,
            intercept=True,
            **_MOESAIC,
        ),
        Recipe(
            "moesaic-neurons",
            "every neuron an expert, chosen by its own gate and a sketch of W_up; layers share "
            "one budget; fits no stock architecture",
            "contribution",
            "neurons",
            "gates",
            gating="threshold",
            layer_budgets=True,
            repair="least-squares",
            intercept=True,
            up_steps=4,
        ),
        Recipe("cmoe", "the paper's method to the letter", *_PAPER, experts=8),
        Recipe(
            "cmoe-code",
            "what the paper's released code does",
            *_PAPER,
            experts=8,
            kmeans_rounds=1,
            normalise=True,
            absolute=True,
        ),
        Recipe(
            "static",
            "keep the best neurons, no routing",
            "contribution",
            "none",
            "none",
        ),
        Recipe(
            "static-repaired",
            "keep the best neurons, least-squares repair",
            "contribution",
            "none",
            "none",
            repair="least-squares",
        ),
        Recipe(
            "random",
            "random experts and router",
            "random",
            "random",
            "random",
            experts=8,
        ),
        Recipe(
            "oracle",
            "reference: moesaic's experts, each token runs its best; saves nothing",
            router="oracle",
            **_MOESAIC,
        ),
        Recipe(
            "neuron-oracle",
            "reference: each token runs its best neurons; saves nothing",
            "contribution",
            "neurons",
            "oracle",
        ),
    )
}


def load_recipe(recipe: str | Path | Recipe) -> Recipe:
    """A recipe by name or from a YAML file with the fields of `Recipe`.

    A file may start from a known recipe: `base: cmoe`. Raises MoesaicError for an unknown name,
    field or ingredient, and for a file that is not such a mapping.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe) in RECIPES:
        return RECIPES[str(recipe)]
    path = Path(recipe)
    if path.suffix not in {".yaml", ".yml"}:
        raise unknown("recipe", str(recipe), [*RECIPES, "FILE.yaml"])
    try:
        given = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MoesaicError(f"recipe {path}: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise MoesaicError(f"recipe {path}: expected a mapping such as 'base: cmoe'")
    base = given.pop("base", None)
    if base is not None and (not isinstance(base, str) or base not in RECIPES):
        raise unknown("recipe", str(base), RECIPES)
    names = {field.name for field in fields(Recipe)}
    for key in given:
        if key not in names:
            raise unknown("recipe field", str(key), [*names, "base"])
    values: dict[str, Any] = {"name": path.stem, "about": f"from {path.name}"}
    values |= {
        k: v
        for k, v in (RECIPES[base].to_dict() if base else {}).items()
        if k not in values
    }
    values |= given
    if missing := [
        name for name in ("importance", "grouping", "router") if name not in values
    ]:
        raise MoesaicError(
            f"recipe {path}: {', '.join(missing)} not given (or name a 'base')"
        )
    return Recipe(**values)


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False)
