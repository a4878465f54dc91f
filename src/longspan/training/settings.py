"""`--set name=value`: which part of a recipe a name belongs to, and what the value is."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
from collections.abc import Iterable
from typing import Any

from longspan.attention.methods import find as find_method
from longspan.models import LongspanConfig
from longspan.tasks.base import Task
from longspan.training.recipes import Recipe

PARTS = ("config", "options", "data")


def known(task: Task, method: str) -> dict[str, str]:
    """Every name that may be set, and the part of the recipe it belongs to."""
    row = find_method(method)
    function = list(inspect.signature(row.function).parameters.values())[3:]
    module = inspect.signature(row.module).parameters.values()
    options = {p.name for p in (*function, *module) if p.kind is p.KEYWORD_ONLY} - {"key_mask"}
    load = inspect.signature(task.load).parameters.values()
    data = {p.name for p in load if p.kind is p.KEYWORD_ONLY} - {"length", "device"}
    recipe = {f.name for f in dataclasses.fields(Recipe)} - set(PARTS)
    config = set(LongspanConfig.__annotations__) - {"method", "options", "model_type"}
    return {
        **dict.fromkeys(sorted(config), "config"),
        **dict.fromkeys(sorted(data), "data"),
        **dict.fromkeys(sorted(options), "options"),
        **dict.fromkeys(sorted(recipe), "recipe"),
    }


def parse(settings: Iterable[str]) -> dict[str, Any]:
    """`["steps=10", "whole_word=true"]` as names and values: JSON where it reads so, else text."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"--set must be name=value, got {setting!r}")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = {"True": True, "False": False, "None": None}.get(text, text)
    return found


def apply(recipe: Recipe, task: Task, method: str, settings: dict[str, Any]) -> Recipe:
    """The recipe with settings, each where its name belongs; an unknown name is an error."""
    names = known(task, method)
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"--set must name one of {', '.join(sorted(names))}, got {name!r}{hint}"
            )
        if names[name] == "recipe":
            changes[name] = value
        else:
            changes.setdefault(names[name], {})[name] = value
    return recipe.changed(**changes)


def telling(recipe: Recipe, task: Task, method: str, given: Iterable[str]) -> list[str]:
    """Those of the settings that the recipe does not have anyway, as they were given."""
    names = known(task, method)

    def is_new(name: str, value: Any) -> bool:
        part = names.get(name, "recipe")
        values = vars(recipe) if part == "recipe" else getattr(recipe, part)
        return name not in values or values[name] != value

    return [setting for setting in given if is_new(*next(iter(parse([setting]).items())))]
