"""Cohorts, read and analysed in R; these tests run where R and its package ``shapes`` are.

Debian has both: ``apt install r-base-core r-cran-shapes``.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.io import read_landmarks
from app.shapes import COHORT_FORMATS, Cohort, analyse_shapes, fit_similarity
from app.shapes.procrustes import ShapeSpace
from tests.support.documents import DOCS, code_blocks, read
from tests.support.synthetic import make_shape

RSCRIPT: Final = shutil.which("Rscript")
EXACT: Final = 1e-6
"""Files have six decimals, of millimetres; shapes have size one."""


def run_r(program: str, folder: Path) -> None:
    """Run a program in R, in a folder and without a display."""
    assert RSCRIPT is not None
    done = subprocess.run(
        [RSCRIPT, "--vanilla", "-e", program],
        cwd=folder,
        env=os.environ | {"RGL_USE_NULL": "TRUE"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", autouse=True)
def _r_with_shapes(tmp_path_factory: pytest.TempPathFactory) -> None:
    if RSCRIPT is None:
        pytest.skip("needs R")
    asked = "quit(status = !requireNamespace('shapes', quietly = TRUE))"
    try:
        run_r(asked, tmp_path_factory.mktemp("asked"))
    except AssertionError:
        pytest.skip("needs R's package shapes")


def make_cohort(*, missing: bool) -> Cohort:
    """Make specimens that differ as subjects of one kind do, in their own poses and sizes."""
    random = np.random.default_rng(12)
    shape = make_shape(3)
    points = shape + random.normal(0, 0.02 * np.ptp(shape), (11, *shape.shape))
    points = points * random.uniform(0.5, 2, (11, 1, 1)) + random.uniform(-50, 50, (11, 1, 3))
    if missing:
        points[4, 2] = points[7, :3] = np.nan
    names = [f"{number + 1}" for number in range(len(shape))]
    return Cohort(tuple(f"S {number}" for number in range(11)), tuple(names), points)


READ: Final = """
save <- function(name, values) {
  text <- formatC(values, digits = 17, format = "g")
  write.table(text, name, quote = FALSE, row.names = FALSE, col.names = FALSE)
}
lines <- readLines("all.tps")
save("tps", as.matrix(read.table(text = lines[!grepl("=", lines)])))
numbers <- scan("all.nts", skip = 3, na.strings = "-9999.000000000")
save("nts", matrix(numbers, ncol = 3, byrow = TRUE))
lines <- readLines("all.morphologika")
raw <- lines[-(1:which(lines == "[rawpoints]"))]
save("morphologika", as.matrix(read.table(text = raw[!grepl("'", raw)])))
table <- read.csv("all.csv", row.names = 1, check.names = FALSE)
save("csv", matrix(t(table), ncol = 3, byrow = TRUE))
writeLines(rownames(table), "names")
"""


@pytest.mark.parametrize("missing", [False, True])
def test_r_reads_every_format_and_what_is_missing(tmp_path: Path, *, missing: bool) -> None:
    cohort = make_cohort(missing=missing)
    for name, write in COHORT_FORMATS.items():
        (tmp_path / f"all.{name}").write_text(write(cohort), encoding="utf-8")
    run_r(READ, tmp_path)
    for name in COHORT_FORMATS:
        words = np.genfromtxt(tmp_path / name, missing_values="NA", filling_values=np.nan)
        assert_allclose(words, cohort.points.reshape(-1, 3), atol=5e-7)
    assert (tmp_path / "names").read_text().splitlines() == list(cohort.specimens)


PARTIAL: Final = """
centred <- apply(points, 3, function(one) scale(one, scale = FALSE))
size <- sqrt(colSums(centred^2))
unit <- array(sweep(centred, 2, size, "/"), dim(points))
mean <- procGPA(unit, scale = FALSE, tol1 = 1e-12)$mshape
write.table(fit$rawscores, "scores", row.names = FALSE, col.names = FALSE)
write.table(fit$percent, "percent", row.names = FALSE, col.names = FALSE)
write.table(mean, "mean", row.names = FALSE, col.names = FALSE)
write.table(size, "size", row.names = FALSE, col.names = FALSE)
"""


def check_against_r(cohort: Cohort, folder: Path) -> ShapeSpace:
    """Compare our analysis with that of the page's program in R."""
    (folder / "skulls.csv").write_text(COHORT_FORMATS["csv"](cohort), encoding="utf-8")
    _, block = code_blocks(read(DOCS / "morphometrics.md"), "r")
    run_r(block + PARTIAL, folder)
    space = analyse_shapes(cohort)
    count = len(space.explained)
    scores, percent, mean, size = (
        np.loadtxt(folder / name) for name in ("scores", "percent", "mean", "size")
    )
    assert_allclose(percent[:count] / 100, space.explained, atol=EXACT)
    sign = np.sign((scores[:, :count] * space.scores).sum(axis=0))
    assert_allclose(sign * scores[:, :count], space.scores, atol=EXACT)
    # Full Procrustes analysis, of the page, has another mean; the partial one has ours.
    mean /= np.linalg.norm(mean)
    turned = fit_similarity(mean, space.mean, np.ones(len(mean)), (1.0, 1.0)).apply(mean)
    assert_allclose(turned, space.mean, atol=EXACT)
    assert_allclose(size, space.size_mm, atol=1e-5)
    return space


def test_program_of_the_page_finds_our_components_scores_and_mean(tmp_path: Path) -> None:
    assert len(check_against_r(make_cohort(missing=False), tmp_path).explained) == 10


def test_r_finds_our_components_of_real_skulls(data_dir: Path, tmp_path: Path) -> None:
    paths = sorted((data_dir / "mouse-skull" / "landmarks").iterdir())
    found = [read_landmarks(path) for path in paths]
    cohort = Cohort(
        tuple(path.name for path in paths),
        tuple(found[0]),
        np.array([list(points.values()) for points in found]),
    )
    assert len(check_against_r(cohort, tmp_path).explained) == 23


def test_program_of_the_page_joins_what_is_measured_with_what_is_known_of_subjects(
    tmp_path: Path,
) -> None:
    rows = (
        "scan,name,value,unit,low95,high95,reason",
        "007,length,20.1,mm,19.9,20.3,",
        "7,length,22.0,mm,,,low confidence: nose",
        "8,length,21.0,mm,20.8,21.2,",
    )
    (tmp_path / "lengths.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "subjects.csv").write_text("scan,strain\n007,a\n7,a\n8,b\n")
    join, _ = code_blocks(read(DOCS / "morphometrics.md"), "r")
    run_r(join + "writeLines(sure$scan, 'joined')", tmp_path)
    assert (tmp_path / "joined").read_text().split() == ["007", "8"]
