"""The pages are true: every Python block of README.md and docs/ runs, and every make target they name exists.

The blocks of one page run in order in one namespace, in a temporary directory. A block that cannot run here (it needs
a GPU, say) is marked by a comment on the line before it: `<!-- not run: the reason -->`.
"""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:[ ]*<!--\s*not run:(?P<reason>[^\n]*)-->[ ]*\n\s*)?"
    r"^(?P<indent>[ ]*)```[ ]*(?:python|py)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)


def blocks_to_run(page):
    """The page's Python blocks, each preceded by empty lines so that a traceback's line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["reason"] is None:
            lines_before = text.count("\n", 0, match.start("code"))
            yield "\n" * lines_before + textwrap.dedent(match["code"])
        else:
            assert match["reason"].strip(), f"{page}: a block that is not run says why"


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks_to_run(page))], ids=name)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace = {"__name__": "__page__"}
    for block in blocks_to_run(page):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_make_targets_that_a_page_names_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


def test_the_blocks_are_found_and_those_marked_are_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nb\n```\n\n"
        "<!-- not run: a folder -->\n\n```python\nc\n```\n\n"
        "- item\n\n    ```python\n    d = 2\n    ```\n```bash\nls\n```\n"
    )
    assert [block.strip() for block in blocks_to_run(page)] == ["a = 1", "d = 2"]
