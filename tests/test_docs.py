"""The documentation is complete, its examples run, its commands parse and its links lead somewhere.

Each check returns complaints about a text, so that it can be shown to fail on a planted mistake.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

import ridgeline
from ridgeline import errors
from ridgeline.cli import INTERRUPTED, _parser, main
from ridgeline.errors import RidgelineError
from ridgeline.specs import find_spec, spec_from_toml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
REFERENCE = DOCS / "reference.md"
MAX_PAGE_LINES = 150
GROWS = {"log.md", "reference.md"}  # an entry a change, a section a name

FENCE = re.compile(
    r"^(?P<mark><!-- runnable -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
# the first line of an example that is to be saved under this name
SAVED_AS = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    runnable: bool


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    return [Block(m["language"], m["body"], bool(m["mark"])) for m in FENCE.finditer(text)]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def verbs() -> dict[str, argparse.ArgumentParser]:
    (group,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(group.choices)


def section(text: str, heading: str) -> str:
    """What stands below the heading that begins so, up to the next heading; "" without one."""
    found = re.search(rf"^### `{re.escape(heading)}\b[^\n]*\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def options_section(text: str, words: str) -> str:
    """What stands below "Options of `ridgeline WORDS`", else below the verb's own heading."""
    own = text.partition(f"### Options of `ridgeline {words}`\n")[2].partition("\n### ")[0]
    return own or section(text, f"ridgeline {words.split()[0]}")


# --- the reference is complete ---------------------------------------------------------------------------------------


def undocumented_names(text: str, names: list[str]) -> list[str]:
    return [name for name in names if not section(text, f"ridgeline.{name}")]


def undocumented_fields(text: str, name: str) -> list[str]:
    cls = getattr(ridgeline, name)
    return [field.name for field in fields(cls) if f"`{field.name}`" not in section(text, f"ridgeline.{name}")]


def undocumented_options(text: str, verb: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    own = section(text, f"ridgeline {verb}") or options_section(text, verb)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        for name in action.option_strings or [str(action.metavar)]:
            if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", own):
                yield name
        yield from (choice for choice in action.choices or () if f"`{choice}`" not in own)


def nested(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers below a verb's, by name: of `train` that is `ddpm`."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: below for group in groups for name, below in group.choices.items()}


def invented_options(text: str, verb: str, parser: argparse.ArgumentParser) -> set[str]:
    parsers = (parser, *nested(parser).values())
    known = {name for each in parsers for action in each._actions for name in action.option_strings}
    return set(re.findall(r"--[a-z][a-z0-9-]*", section(text, f"ridgeline {verb}"))) - known


def exit_codes() -> set[int]:
    refusals = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RidgelineError)]
    return {0, INTERRUPTED, *(kind.exit_code for kind in refusals)}


def test_every_public_name_has_a_section():
    assert undocumented_names(read(REFERENCE), ridgeline.__all__) == []


@pytest.mark.parametrize("name", [name for name in ridgeline.__all__ if is_dataclass(getattr(ridgeline, name))])
def test_every_field_is_listed(name):
    assert undocumented_fields(read(REFERENCE), name) == []


@pytest.mark.parametrize("verb", verbs())
def test_every_option_is_listed(verb):
    assert list(undocumented_options(read(REFERENCE), verb, verbs()[verb])) == []
    assert invented_options(read(REFERENCE), verb, verbs()[verb]) == set()


@pytest.mark.parametrize("words", [f"{verb} {name}" for verb, parser in verbs().items() for name in nested(parser)])
def test_every_option_of_a_nested_verb_is_listed(words):
    verb, name = words.split()
    assert list(undocumented_options(read(REFERENCE), words, nested(verbs()[verb])[name])) == []


def test_every_exit_code_is_listed():
    table = read(REFERENCE).partition("### Exit codes")[2]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == exit_codes() | {1}


def test_completeness_checks_can_fail():
    text = read(REFERENCE)
    assert undocumented_names(text, ["estimate", "brew"]) == ["brew"]
    assert undocumented_names(text.replace("### `ridgeline.Cost`", ""), ["Cost", "CostMode"]) == ["Cost"]
    assert undocumented_fields(text.replace("`chain_length`", ""), "Report") == ["chain_length"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", choices=("one", "L4"))
    parser.add_argument("--new-one")
    assert list(undocumented_options("### `ridgeline run`\n`--gpu` `L4`\n", "run", parser)) == ["one", "--new-one"]
    assert list(undocumented_options("### `ridgeline run`\n`--gpu-id` `--new-one` `L4` `one`", "run", parser)) == [
        "--gpu"
    ]
    below = "### `ridgeline run`\n`--gpu` `L4` `one`\n### Options of `ridgeline run fast`\n`--new-one`"
    assert list(undocumented_options(below, "run fast", parser)) == ["--gpu", "one", "L4"]
    assert list(undocumented_options(below, "run slow", parser)) == ["--new-one"]
    assert invented_options("### `ridgeline run`\n`--gpu` `--cpu`\n### next\n--other", "run", parser) == {"--cpu"}


# --- examples run, commands parse ------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Every `$ ridgeline …` line of the text's console blocks, as arguments."""
    lines = [line for block in blocks(text) if block.language == "console" for line in block.body.splitlines()]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]
    return [argv[1:] for argv in words if argv and argv[0] == "ridgeline"]


def wrong_commands(text: str) -> Iterator[str]:
    for argv in commands(text):
        try:
            arguments = _parser().parse_args(argv)
        except SystemExit as stop:
            if stop.code:
                yield shlex.join(argv)
            continue
        gpu = getattr(arguments, "gpu", None)
        if gpu is not None and not gpu.endswith(".toml"):
            find_spec(gpu)


def wrong_verbs(text: str) -> list[str]:
    """Verbs that inline code promises and the command does not have."""
    named = [code.split()[1] for code in INLINE.findall(prose(text)) if code.startswith("ridgeline ")]
    return [verb for verb in named if verb not in verbs() and not verb.startswith("-") and verb != "VERB"]


def missing_make_targets(text: str) -> list[str]:
    makefile = read(ROOT / "Makefile")
    code = "\n".join([*INLINE.findall(prose(text)), *(block.body for block in blocks(text))])
    named = re.findall(r"^(?:\$ )?make ([a-z]+)", code, re.MULTILINE)
    return [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def run_examples(text: str, folder: Path) -> int:
    """Runs each runnable block in order and every roofline of a file that a block gave; returns how many ran."""
    ran, saved = 0, set()
    for block in blocks(text):
        if not block.runnable:
            continue
        if name := SAVED_AS.match(block.body):
            (folder / name[1]).write_text(block.body, encoding="utf-8")
            saved.add(name[1])
        if block.language == "python":
            exec(compile(block.body, f"<example in {folder.name}>", "exec"), {"__name__": "example"})
        else:
            assert block.language == "toml", f"nothing runs a {block.language} block"
            spec_from_toml(folder / SAVED_AS.match(block.body)[1])
        ran += 1
    for argv in commands(text):
        if argv[0] == "roofline" and argv[1].partition(":")[0] in saved:
            assert main(argv) == 0, shlex.join(argv)
    return ran


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_parse(path):
    assert list(wrong_commands(read(path))) == []
    assert wrong_verbs(read(path)) == []
    assert missing_make_targets(read(path)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(read(path), tmp_path)


def test_every_kind_of_page_has_an_example_that_runs():
    with_examples = {path.name for path in PAGES if any(block.runnable for block in blocks(read(path)))}
    assert {"README.md", "tutorial-roofline.md", "howto-roofline.md", "reference.md"} <= with_examples


def test_example_checks_can_fail(tmp_path, monkeypatch):
    def console(line: str) -> str:
        return f"```console\n$ {line}\n```\n"

    assert list(wrong_commands(console("ridgeline roofline yolo26n --rows 3  # three"))) == []
    assert list(wrong_commands(console("ridgeline roofline yolo26n --row-count 3"))) != []
    assert list(wrong_commands(console("ridgeline brew run.json"))) == ["brew run.json"]
    with pytest.raises(errors.UsageError):
        list(wrong_commands(console("ridgeline roofline yolo26n --gpu L41")))
    assert wrong_verbs("`ridgeline roofline x`, `ridgeline brew`, `ridgeline --help`") == ["brew"]
    assert missing_make_targets("`make demo`, `make coffee`\n" + console("make tea")) == ["coffee", "tea"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        run_examples("<!-- runnable -->\n```python\nassert 1 == 2\n```\n", tmp_path)
    assert run_examples("```python\nassert 1 == 2\n```\n", tmp_path) == 0
    broken = "<!-- runnable -->\n```python\n# b.py\ndef build(): return 3\n```\n"
    assert run_examples(broken, tmp_path) == 1
    with pytest.raises(AssertionError, match=r"roofline b\.py:build"):
        run_examples(broken + console("ridgeline roofline b.py:build --gpu L4"), tmp_path)


# --- pages hang together ---------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Headings as GitHub and MkDocs link to them."""
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(prose(text))]
    return {re.sub(r"\s", "-", heading) for heading in plain}


def dead_links(text: str, folder: Path) -> Iterator[str]:
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else None
        missing = target is not None and not target.exists()
        if missing or (anchor and anchor not in anchors(read(target) if target else text)):
            yield link


def outside_navigation(navigation: str, pages: set[str]) -> set[str]:
    """Pages the site's navigation lacks, and those it names that are not there."""
    return set(re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)) ^ pages


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert list(dead_links(read(path), path.parent)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_short_and_have_one_title(path):
    text = read(path)
    assert len(re.findall(r"^# ", prose(text), re.MULTILINE)) == 1
    assert path.name in GROWS or text.count("\n") <= MAX_PAGE_LINES


def test_the_site_shows_every_page():
    assert outside_navigation(read(ROOT / "mkdocs.yml"), {path.name for path in DOCS.glob("*.md")} | GROWS) == set()


def test_link_checks_can_fail():
    good = "[a](reference.md), [b](index.md#ridgeline), [c](https://example.org), `[d](no.md)`\n"
    assert list(dead_links(good.replace("`[d](no.md)`", ""), DOCS)) == []
    assert list(dead_links("[a](absent.md) [b](index.md#absent) [c](#here)\n# There", DOCS)) == [
        "absent.md",
        "index.md#absent",
        "#here",
    ]
    assert outside_navigation("nav:\n  - A: a.md\n  - B: b.md\n", {"a.md", "c.md"}) == {"b.md", "c.md"}
