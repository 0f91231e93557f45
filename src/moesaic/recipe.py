"""Recipes: one ingredient per step. Every method is a row of RECIPES or a YAML file like one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from moesaic.errors import MoesaicError, unknown
from moesaic.grouping import GROUPING
from moesaic.importance import IMPORTANCE
from moesaic.routers import ROUTERS

_INGREDIENTS: dict[str, Iterable[str]] = {
    "importance": IMPORTANCE,
    "grouping": GROUPING,
    "router": ROUTERS,
}


@dataclass(frozen=True)
class Recipe:
    """One choice per step of a conversion.

    `normalise` profiles and routes with unit-length inputs and weight rows; `absolute` ranks
    experts by the absolute value of their scores.
    """

    name: str
    about: str
    importance: str
    grouping: str
    router: str
    activation_top_k: int = 10
    kmeans_rounds: int = 20
    normalise: bool = False
    absolute: bool = False

    def __post_init__(self) -> None:
        for step, known in _INGREDIENTS.items():
            if not isinstance(getattr(self, step), str) or getattr(self, step) not in known:
                raise unknown(step, str(getattr(self, step)), known)
        if (self.grouping == "none") != (self.router == "none"):
            raise MoesaicError(
                f"recipe {self.name!r}: grouping {self.grouping!r} with router {self.router!r}; "
                "without groups there is nothing to route, so both are none or neither"
            )
        if self.normalise and self.importance == "contribution":
            raise MoesaicError(
                f"recipe {self.name!r}: contributions of a normalised FFN mean nothing; use "
                "importance rate, or normalise: false"
            )
        for name in ("activation_top_k", "kmeans_rounds"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise MoesaicError(f"recipe {self.name!r}: {name} is {value!r}; it must be >= 1")
        for name in ("normalise", "absolute"):
            if type(getattr(self, name)) is not bool:
                raise MoesaicError(
                    f"recipe {self.name!r}: {name} is {getattr(self, name)!r}; it is true or false"
                )

    @property
    def routed(self) -> bool:
        return self.grouping != "none"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "cmoe", "the paper's method to the letter", "rate", "balanced-kmeans", "representative"
        ),
        Recipe(
            "cmoe-code",
            "what the paper's released code does",
            "rate",
            "balanced-kmeans",
            "representative",
            kmeans_rounds=1,
            normalise=True,
            absolute=True,
        ),
        Recipe("static", "keep the best neurons, no routing", "contribution", "none", "none"),
        Recipe("random", "random experts and router", "random", "random", "random"),
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
        k: v for k, v in (RECIPES[base].to_dict() if base else {}).items() if k not in values
    }
    values |= given
    if missing := [name for name in ("importance", "grouping", "router") if name not in values]:
        raise MoesaicError(f"recipe {path}: {', '.join(missing)} not given (or name a 'base')")
    return Recipe(**values)


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False)
