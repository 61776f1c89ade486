"""The page's colours can be read in both themes: WCAG 2.2, level AA."""

import re
from importlib.resources import files

import pytest

TEXTS = ("text", "quiet", "prefill", "decode", "kv", "good", "warn", "bad")
GROUNDS = ("ground", "surface", "sunk")


def colours(theme: int) -> dict[str, str]:
    css = (files("gateway.http.page") / "page.css").read_text()
    found = re.findall(r"--([a-z]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", css)
    return {name: pair[theme] for name, *pair in found}


def luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme: int) -> None:
    found = colours(theme)
    too_faint = [
        (text, ground) for text in TEXTS for ground in GROUNDS if contrast(found[text], found[ground]) < 4.5
    ]
    assert too_faint == []


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_that_mean_something_can_be_seen(theme: int) -> None:
    found = colours(theme)
    assert contrast(found["link"], found["surface"]) >= 2.8  # those that nothing crosses; busy ones are `kv`
