"""What the documents say is true of the code: links, names, settings, calls, errors and figures."""

import csv
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from app.api.app import create_app
from app.api.scans.heatmaps import HeatmapsQuery
from app.api.scans.landmarks import LandmarksQuery
from app.api.votes import VotesQuery
from app.cli.main import app as command_line
from app.errors import LandmarkdError, ServiceError, StartupError
from app.inference.votes_request import MAX_RADIUS, MAX_SMOOTHING
from app.io import SCAN_FORMATS, LandmarkAnswer
from app.settings import PREFIX, Settings
from app.voting import VOTES_FORMATS
from tests.support.documents import DOCS, DOCUMENTS, PAGES, README, ROOT, code_blocks, prose, read
from tests.support.settings_page import PAGE, settings_page

NAME_TESTS = (ROOT / "SECURITY.md", DOCS / "bounds.md")
OF_TODAY = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
README_LINES = 130
IMAGE_BYTES = 400_000
NOT_SETTINGS = {
    "LANDMARKD_DATA",
    "LANDMARKD_API_KEY",
    "LANDMARKD_SKULL_FOLDS",
    "LANDMARKD_LUMBAR_FOLDS",
}
"""Of the tests and benchmarks, and of the command line as a client."""

TRAINER_COMMANDS = ("train", "refine", "evaluate", "calibrate", "learn")
OPTIONS_OF_OTHERS = {"--constraint", "--editable", "--data-binary"}
"""Of pip and curl."""

ABSTRACT = (LandmarkdError, ServiceError)
NOT_ANSWERED = (StartupError,)
CLIENT_LEFT = 499
ROUTING = {(404, "not-found"), (405, "method-not-allowed")}
"""Of requests that no route answers."""

RESULTS = ROOT / "tests" / "benchmarks" / "results"
TIMES = "\N{MULTIPLICATION SIGN}"
FIGURE = re.compile(rf"(\d+(?:\.\d+)?) ?(ms|s|mm|voxel|GB|MB|%|{TIMES})(?![\w³])")
UNITS = {
    "ms": ("s", 1e-3), "s": ("s", 1.0), "GB": ("B", 1e9), "MB": ("B", 1e6),
    "mm": ("mm", 1.0), "voxel": ("voxel", 1.0), "grid voxel": ("voxel", 1.0), "%": ("%", 1.0),
}  # fmt: skip
HUGE_OF_EIGHT = "8 clients, p50 of huge scans"
ROUNDING = 0.501
"""Of the last digit; a little more than a half, as floats are not decimal."""


def documented(path: Path) -> str:
    return str(path.relative_to(ROOT))


def slug(heading: str) -> str:
    """Make the anchor that GitHub gives to a heading."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(read(path)), flags=re.MULTILINE)
    return {slug(heading) for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=documented)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(read(path)))
    dead = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(link)
    assert dead == []


def test_every_page_is_in_the_map() -> None:
    linked = set(LINK.findall(read(DOCS / "index.md")))
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= linked


def test_readme_is_short_and_its_picture_small() -> None:
    assert len(read(README).splitlines()) <= README_LINES
    (picture,) = re.findall(r"!\[[^\]]+\]\((\S+)\)", read(README))
    content = (ROOT / picture).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < IMAGE_BYTES


def test_settings_page_is_what_the_settings_generate() -> None:
    assert read(PAGE) == settings_page(), "run python -m tests.support.settings_page"


@pytest.mark.parametrize("path", DOCUMENTS, ids=documented)
def test_no_document_names_a_setting_that_does_not_exist(path: Path) -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | NOT_SETTINGS
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", read(path))) <= known


@pytest.mark.parametrize("path", OF_TODAY, ids=documented)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"`((?:app|tests|docs|deploy|models)/[\w./-]*)`", read(path))
    assert [name for name in named if "NAME" not in name and not _exists(name)] == []
    modules = re.findall(r"\b(?:app|tests)\.[a-z_.]+\b", read(path))
    assert [name for name in modules if not _is_module(name)] == []


@pytest.mark.parametrize("path", NAME_TESTS, ids=documented)
def test_tests_that_are_named_exist(path: Path) -> None:
    sources = [source.read_text(encoding="utf-8") for source in (ROOT / "tests").rglob("test_*.py")]
    there = set(re.findall(r"^(?:async )?def (test_\w+)", "\n".join(sources), flags=re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", read(path)))
    assert len(named) > 20
    assert named - there == set()


def _exists(name: str) -> bool:
    return (ROOT / name).exists() or "my-model" in name


def _is_module(name: str) -> bool:
    return any((ROOT / (name.replace(".", "/") + end)).exists() for end in ("", ".py"))


def test_examples_of_the_architecture_name_what_is_there() -> None:
    text = " ".join(read(DOCS / "architecture.md").split())
    named = re.findall(r"`(\w+)` in `(app/[\w/]+\.py)`", text)
    assert len(named) >= 8
    for name, module in named:
        source = (ROOT / module).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", source, flags=re.MULTILINE), (name, module)


def test_architecture_names_every_package() -> None:
    text = read(DOCS / "architecture.md")
    packages = {path.parent.name for path in (ROOT / "app").glob("*/__init__.py")}
    assert [name for name in packages if f"[{name}](../app/{name})" not in text] == []


def test_surroundings_of_the_example_are_those_of_the_model_that_it_names() -> None:
    blocks = code_blocks(read(ROOT / "models" / "README.md"), "toml")
    (example,) = [tomllib.loads(block) for block in blocks if block.startswith("surroundings")]
    model = tomllib.loads(read(ROOT / "models" / "lumbar-mri" / "model.toml"))
    assert example["surroundings"] == model["shape"]["surroundings"]


def test_every_call_is_described() -> None:
    text = read(DOCS / "http.md")
    assert [path for path in create_app(Settings()).openapi()["paths"] if path not in text] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("http.md", LandmarksQuery.model_fields),
        ("http.md", HeatmapsQuery.model_fields),
        ("http.md", {form.name: form for form in SCAN_FORMATS}),
        ("http.md", set(LandmarkAnswer.model_fields) - {"name", "description", "candidates"}),
        ("votes.md", VotesQuery.model_fields),
        ("votes.md", {form.name: form for form in VOTES_FORMATS}),
    ],
    ids=["query", "query of heatmaps", "formats", "landmark", "query of votes", "formats of votes"],
)
def test_every_name_of_the_interface_is_described(page: str, names: object) -> None:
    text = read(DOCS / page)
    assert isinstance(names, dict | set)
    assert [name for name in names if f"`{name}`" not in text] == []


def test_query_of_heatmaps_is_described_where_they_are() -> None:
    section = read(DOCS / "http.md").partition("\n## Heatmaps\n")[2].partition("\n## ")[0]
    assert [name for name in HeatmapsQuery.model_fields if f"`{name}`" not in section] == []


def test_limits_of_votes_are_told() -> None:
    text = read(DOCS / "votes.md")
    assert f"votes for a landmark; 1 to {MAX_RADIUS} voxels |" in text
    assert f"over the heatmaps; up to {MAX_SMOOTHING} voxels |" in text


def errors(base: type[LandmarkdError] = LandmarkdError) -> Iterator[type[LandmarkdError]]:
    for error in base.__subclasses__():
        yield error
        yield from errors(error)


def test_every_error_is_described_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| ([^|]+) \|", read(DOCS / "http.md"), flags=re.MULTILINE)
    described = {(int(status), code) for status, codes in rows for code in _codes(codes)}
    expected = {
        (error.status, error.code)
        for error in errors()
        if error.__module__ == "app.errors"
        and error not in ABSTRACT
        and not issubclass(error, NOT_ANSWERED)
        and error.status != CLIENT_LEFT
    }
    assert described == expected | ROUTING | {(LandmarkdError.status, LandmarkdError.code)}


def _codes(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(command_line)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def test_every_command_is_described() -> None:
    text = " ".join(read(path) for path in PAGES)
    assert [name for name in commands() if f"landmarkd {name}" not in text] == []


def test_options_of_the_training_page_exist() -> None:
    there = commands()
    options = {
        option
        for name in (*TRAINER_COMMANDS, "phantom")
        for each in there[name].params
        for option in each.opts
    }
    named = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", read(DOCS / "training.md")))
    assert named - OPTIONS_OF_OTHERS <= options | {"--help"}


def measured(name: str) -> list[tuple[str, float]]:
    """List the figures of a benchmark: kind and value of ours, of theirs, and their ratio."""
    figures = []
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kind, factor = UNITS.get(row["unit"], (row["unit"], 1.0))
            figures += [(kind, factor * float(row[key])) for key in ("ours", "theirs") if row[key]]
            figures += [(TIMES, float(row["ratio"]))] if row["ratio"] else []
    return figures


def benchmark_rows() -> list[tuple[str, str, str]]:
    """List the rows of results: benchmark, what was done, and the cells with figures."""
    rows = []
    for line in read(DOCS / "benchmarks.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.fullmatch(r"\[\w+\]\(\.\./tests/benchmarks/results/(\S+)\.csv\)", cells[-1])
        if name:
            figures = [cell for cell in cells[1:-1] if not cell.startswith(("≤", "≥"))]
            rows.append((name[1], cells[0], " ".join(figures)))
    return rows


@pytest.mark.parametrize(("name", "what", "figures"), benchmark_rows())
def test_figures_of_the_benchmarks_are_those_measured(name: str, what: str, figures: str) -> None:
    known = measured(name)
    found = FIGURE.findall(figures)
    assert found
    for digits, unit in found:
        kind, factor = UNITS.get(unit, (unit, 1.0))
        near = [one for of, one in known if of == kind and _is_rounded(digits, one / factor)]
        assert near, f"{what}: {digits} {unit} is not in {name}.csv"


def test_ranges_of_what_is_not_met_are_those_measured() -> None:
    text = " ".join(read(DOCS / "benchmarks.md").split())
    alone, *ranks = [
        float(row["ratio"])
        for machine in ("epyc-avx2", "epyc", "xeon-amx")
        for row in _rows(f"{machine}/S10")
    ]
    served = f"{alone:.2f} times as long as its networks alone without bfloat16"
    assert f"{served}, {min(ranks):.2f} to {max(ranks):.2f} times with it" in text
    slowest = [
        max(1 / float(row["ratio"]) for row in _rows(name) if row["what"] == HUGE_OF_EIGHT)
        for name in ("load", "epyc/load", "epyc-avx2/load")
    ]
    assert f"huge scans take {min(slowest):.1f} to {max(slowest):.1f} times as long" in text


def _is_rounded(digits: str, figure: float) -> bool:
    decimals = len(digits.partition(".")[2])
    return abs(float(digits) - abs(figure)) <= ROUNDING * 10.0**-decimals


def test_readme_has_the_measured_errors_of_the_models() -> None:
    text = read(README)
    skulls = {row["what"]: float(row["ours"]) for row in _rows("epyc/A2")}
    phantoms = {row["what"]: float(row["ours"]) for row in _rows("A1")}
    (error,) = [value for what, value in skulls.items() if what.startswith("mean error, 1080")]
    assert f"{error:.2f} mm mean, cross-validated on 24 strains" in text
    (seconds,) = [value for what, value in skulls.items() if what.startswith("time per scan")]
    assert f"{seconds:.2f} s per scan" in text
    (error,) = [value for what, value in phantoms.items() if what.startswith("mean error")]
    assert f"{error:.2f} voxels ({2 * error:.2f} mm) mean, 100 scans" in text


def test_readme_has_the_errors_of_the_cross_validated_spines() -> None:
    path = ROOT / "models" / "lumbar-mri" / "crossvalidation" / "errors.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    scans = {row["scan"] for row in rows}
    centres = [row for row in rows if " " not in row["landmark"]]
    right = scans - {row["scan"] for row in centres if row["identified"] != "True"}
    means = []
    for corners in (False, True):
        errors = [
            float(row["error_mm"])
            for row in rows
            if row["scan"] in right and (" " in row["landmark"]) == corners and row["error_mm"]
        ]
        means.append(sum(errors) / len(errors))
    figures = f"centres {means[0]:.1f} mm, corners {means[1]:.1f} mm mean"
    assert f"{figures}, cross-validated on {len(right)} of {len(scans)} people" in read(README)


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
