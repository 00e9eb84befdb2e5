"""Recipes: every shipped file loads, and every mistake in a file or override is named with what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nibble.errors import NibbleError
from nibble.formats import FORMATS, SealedPageLayout
from nibble.recipes import load_kv_recipe, load_model_recipe, load_serve_recipe, recipe_names
from nibble.visibility import PagePolicy

GOOD_KV = {
    "name": "mine",
    "k": {"bits": 4, "scale": "page_channel", "rotated": False},
    "v": {"bits": 4, "scale": "token", "rotated": True},
    "sink_pages": 1,
    "recent_pages": 1,
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD_KV, **changes}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD_KV.items() if name != key}


def write(folder: Path, content: Any, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_the_shipped_names_are_those_of_the_design() -> None:
    assert recipe_names("kv") == sorted([*FORMATS, "mixed"])
    assert set(recipe_names("models")) >= {
        "smollm2-135m",
        "llama-8b",
        "llama-70b",
        "qwen2.5-7b",
        "qwen3-8b",
        "mistral-7b",
    }


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_shipped_kv_recipe_is_the_format_of_its_name(name: str) -> None:
    recipe = load_kv_recipe(name)
    assert recipe.format == FORMATS[name]
    assert recipe.policy == PagePolicy(sink_pages=1, recent_pages=2 if name == "int4-static" else 1)
    assert SealedPageLayout(recipe.format, 128).page_bytes > 0


@pytest.mark.parametrize("name", recipe_names("models"))
def test_shipped_model_recipe_loads(name: str) -> None:
    assert load_model_recipe(name).name == name


def test_shipped_serve_recipe_loads() -> None:
    assert load_serve_recipe().max_context == 2048


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            changed(colour="red"),
            r"unknown key colour \(got 'red'\); allowed keys: name, k, v, sink_pages, recent_pages",
        ),
        (without("recent_pages"), "missing key recent_pages; allowed an integer from 0 to 16"),
        (without("k"), "missing key k; allowed a mapping with the keys bits, scale, rotated"),
        (changed(sink_pages=17), "key sink_pages: got 17, allowed an integer from 0 to 16"),
        (changed(sink_pages=-1), "key sink_pages: got -1, allowed an integer from 0 to 16"),
        (changed(sink_pages="1"), "key sink_pages: got '1', allowed an integer"),
        (changed(sink_pages=True), "key sink_pages: got True, allowed an integer"),
        (changed(k="int4"), "key k: got 'int4', allowed a mapping"),
        (changed(k={"bits": 5, "scale": "token", "rotated": False}), "key k.bits: got 5, allowed 4, 8, 16"),
        (
            changed(k={"bits": 4, "scale": "row", "rotated": False}),
            "key k.scale: got 'row', allowed none, page_channel",
        ),
        (changed(k={"bits": 4, "scale": "token", "rotated": 1}), "key k.rotated: got 1, allowed true or false"),
        (changed(k={"bits": 4, "scale": "token"}), "missing key k.rotated; allowed true or false"),
        (changed(k={"bits": 4, "scale": "token", "rotated": True}), "K can't be rotated"),
        (changed(k={"bits": 16, "scale": "token", "rotated": False}), "16 bits takes 'none'"),
        (changed(name="other"), "key name: got 'other', allowed 'mine'"),
        (changed(name=3), "key name: got 3, allowed a text"),
        ("- a\n- b\n", "got list at the top, allowed a mapping"),
        ("", "got NoneType at the top"),
        ("name: [", "can't be read as YAML"),
        ("name: mine\nname: mine\n", "key given twice: name"),
    ],
)
def test_mistakes_in_a_kv_recipe_are_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(NibbleError, match=message) as caught:
        load_kv_recipe(write(tmp_path, content))
    assert "mine" in str(caught.value)  # the file or the recipe


def test_every_mistake_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"(?s)sink_pages.*recent_pages"):
        load_kv_recipe(write(tmp_path, changed(sink_pages=99, recent_pages="x")))


def test_own_recipe_file_loads(tmp_path: Path) -> None:
    recipe = load_kv_recipe(write(tmp_path, GOOD_KV))
    assert (recipe.format.k, recipe.format.v) == (FORMATS["int4"].k, FORMATS["int4"].v)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_kv_recipe("int4").sink_pages = 2  # type: ignore[misc]


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(NibbleError, match="got 'int3', allowed fp16, int4, int4-static, int8, int8-static, k8v4"):
        load_kv_recipe("int3")
    with pytest.raises(NibbleError, match=r"got 'gpt5'.*allowed gemma3-270m, llama-70b, llama-8b, mistral-7b"):
        load_model_recipe("gpt5")
    with pytest.raises(NibbleError, match="serve recipe: got 'big', allowed default"):
        load_serve_recipe("big")


def test_overrides_replace_and_none_means_not_given() -> None:
    assert load_serve_recipe(max_context=4096, port=None).max_context == 4096
    assert load_kv_recipe("int4", recent_pages=2).policy.recent_pages == 2
    assert load_model_recipe("llama-8b", tensor_parallel=2).tensor_parallel == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"port": 0}, "override of recipe default: key port: got 0, allowed an integer from 1 to 65535"),
        ({"max_context": 1}, "key max_context: got 1, allowed an integer from 64"),
        ({"speed": 3}, "unknown key speed"),
    ],
)
def test_bad_overrides_are_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        load_serve_recipe(**overrides)


def test_a_folder_gets_a_recipe_by_default_values(tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    recipe = load_model_recipe(str(folder))
    assert (recipe.name, recipe.source, recipe.dtype) == ("My-Model", str(folder), "auto")


def test_a_hub_id_gets_a_recipe_by_default_values() -> None:
    recipe = load_model_recipe("Qwen/Qwen2.5-0.5B", max_context=1024)
    assert (recipe.name, recipe.source, recipe.max_context) == ("Qwen--Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", 1024)
