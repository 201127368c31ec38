"""The command line: what a stranger runs first."""

import sys

from typer.testing import CliRunner

import tangents
import tangents.report
from tangents.cli import app


def test_demo_prints_its_table_and_leaves_a_figure(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    figure = tmp_path / "new" / "demo.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert str(figure) in result.output
    assert "factored" in result.output


def test_demo_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tangents.report.figures", raising=False)
    monkeypatch.delattr(tangents.report, "figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "tangents[plot]" in result.output
    assert not list(tmp_path.iterdir())


def test_demo_that_cannot_write_says_so_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "File exists" in result.output
    assert "Traceback" not in result.output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tangents {tangents.__version__}"
