"""Options -> a model whose error is known: one of all scans, and K that never saw some of them.

Who has 10 to 30 scans with landmarks has none to spare for judging. So K models are trained alike,
each without one K-th of the scans, and answer those that they never saw; the error of all answers
together says what a model that is trained alike on all scans may be expected to do. It is a careful
guess, as that one learns from more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from app.compute import choose_device
from app.errors import BadParameter, StartupError
from app.inference import Detector, load_checked
from app.training.data.check_data import Checked
from app.training.data.folds import (
    FOLDS,
    Folds,
    begin_folds,
    check_same_data,
    digests_of,
    make_folds,
    read_folds,
    unlearnt,
)
from app.training.data.issues import listed
from app.training.evaluate.crossvalidation import Pooled, conclude, describe
from app.training.evaluate.outcome_files import OUTCOMES, read_outcomes, write_outcomes
from app.training.evaluate.outcomes import Outcome, measure
from app.training.files import CHECKPOINT
from app.training.fit.checkpoint import check_same, read_record
from app.training.fit.suggest import Choice
from app.training.options import Missing, Options
from app.training.pipeline import Plan, as_begun, look_through, plan_first, run_first, show
from app.training.refine import FOLDER as REFINE
from app.training.refine import plan_refine, run_refine


@dataclass(frozen=True, slots=True)
class Trainer:
    """How one of a model's networks is trained.

    Attributes:
        plan: Makes all choices of a training.
        run: Trains; says whether it was let to.
        second: Whether it is the second network, so that what is measured are both together.
    """

    plan: Callable[[Options, Checked], Plan]
    run: Callable[[Options, Plan, Console], bool]
    second: bool


FIRST: Final = Trainer(plan_first, run_first, second=False)
SECOND: Final = Trainer(plan_refine, run_refine, second=True)


def crossvalidate(
    options: Options, trainer: Trainer, console: Console, only_check: bool = False
) -> bool:
    """Train a network once without each fold, measure it on that fold, and train it on all scans.

    Whatever is done already is not done again; an interrupted training goes on where it was.

    Args:
        options: What was asked for; the folder is that of the model, or of the first network's.
        trainer: Of which network.
        console: What to report to.
        only_check: Whether to stop before training.

    Returns:
        Whether all was done that was asked for; False if somebody interrupted it.

    Raises:
        StartupError: The data are wrong or have changed, or the folder holds another training.
        BadParameter: There cannot be such folds.
    """
    checked = look_through(options, console)
    folds = choose_folds(options, checked, trainer.second)
    check_start(options, folds, console, trainer.second)
    whole = replace(options, hold_out=())
    plan = trainer.plan(whole, checked)
    if (plan.folder / CHECKPOINT).exists():
        # Now, and not after hours of folds.
        check_same(plan.folder, plan.record, plan.folder / CHECKPOINT)
    show(console, plan.chosen, [choice_of(folds), *plan.choices])
    warn_of_unlearnt(folds, checked, console)
    if only_check:
        return True
    begin_folds(options.folder, folds)
    settled = as_begun(whole, plan.record.plain())
    every = range(1, len(folds.members) + 1)
    numbers: Sequence[int] = every if options.fold is None else [options.fold]
    for number in numbers:
        if not do_fold(settled, folds, number, trainer, checked, console):
            return False
    if options.fold is not None:
        return True
    pooled = gather_folds(options, folds, trainer.second)
    judged = folds.of_scans()
    pairs = [facts.pair for facts in checked.specimens if facts.name in judged]
    conclude(pooled, pairs, console)
    console.print(f"now {options.folder}, of all {len(folds.digests)} scans")
    if not trainer.run(whole, plan, console):
        return False
    describe(pooled)
    return True


def choose_folds(options: Options, checked: Checked, second: bool) -> Folds:
    """Choose who is left out together; for a second network, as for the first.

    Raises:
        BadParameter: There cannot be so many folds; or the first network has others, or none.
        StartupError: The data are others than those of the first network's folds.
    """
    count = options.folds or 0
    if options.fold is not None and not 1 <= options.fold <= count:
        raise BadParameter(f"--fold: expected one of 1 to {count}, got {options.fold}")
    if options.hold_out:
        raise BadParameter("--folds holds out every scan in turn: expected no --validate beside it")
    if not second:
        seed, subject, train_only = options.schedule.seed, options.subject, options.train_only
        return make_folds(checked.specimens, count, seed, subject, train_only)
    return folds_of_first(options, checked, count)


def folds_of_first(options: Options, checked: Checked, count: int) -> Folds:
    """Take the folds of the first network, all of which must be done, as that of all scans.

    Raises:
        BadParameter: The first network has others, or none, or is not done.
        StartupError: The data are others than those of its folds.
    """
    folds = read_folds(options.folder)
    if folds is None:
        raise BadParameter(
            f"--folds: expected a first network with folds, found none in "
            f"{options.folder / FOLDS}: train it with --folds, too"
        )
    if len(folds.members) != count:
        raise BadParameter(
            f"--folds: expected {len(folds.members)}, as the first network has, got {count}"
        )
    check_same_data(options.folder, folds, digests_of(checked.specimens))
    for number in range(1, count + 1):
        folder = folds.folder(options.folder, number)
        if not (folder / OUTCOMES).exists():
            raise BadParameter(
                f"--folds: expected all folds of the first network to be done, {folder} is not: "
                "repeat the command that began it"
            )
    if not (options.folder / "model.toml").exists():
        raise BadParameter(
            f"--folds: expected a first network of all scans, too, found none in {options.folder}: "
            "repeat the command that trained its folds, without --fold"
        )
    return folds


def warn_of_unlearnt(folds: Folds, checked: Checked, console: Console) -> None:
    """Warn of landmarks that count as missed because the models that are asked never saw them."""
    alone = unlearnt(folds, checked.specimens)
    if alone:
        told = f"only scans of one fold have {listed(alone)}: its model cannot learn them"
        console.print(f"[yellow]{told}[/yellow]", highlight=False)


def choice_of(folds: Folds) -> Choice:
    """Say which folds there are, as one choice among others."""
    each = "; ".join(listed(names, most=8) for names in folds.members)
    judged = folds.of_subjects()
    subjects = len(set(judged.values()))
    together = f", scans of {subjects} subjects kept together" if subjects < len(judged) else ""
    more = len(folds.subjects) - len(judged)
    rest = f"; {more} more {'is' if more == 1 else 'are'} only learned from" if more else ""
    return Choice("--folds", str(len(folds.members)), f"each left out once{together}: {each}{rest}")


def check_start(options: Options, folds: Folds, console: Console, second: bool) -> None:
    """Refuse to start from weights that have seen scans which they shall be judged by.

    Raises:
        BadParameter: They have, or are those of folds that are not done.
    """
    start = options.start
    if start is None:
        return
    numbers = range(1, len(folds.members) + 1)
    starts = [start_of(options, folds, number, second) or start for number in numbers]
    if start not in starts:
        undone = [str(path) for path in starts if not (path / OUTCOMES).exists()]
        if undone:
            raise BadParameter(f"--start: expected folds that are done, {listed(undone)} are not")
        return
    record = read_record(start)
    unseen = {name for number in numbers for name in folds.without(number)}
    seen = sorted({*(record or {}).get("train", ())} & unseen)
    if seen:
        raise BadParameter(
            f"--start with --folds: expected weights that have seen none of these scans, or a "
            f"model with the same folds; {start} has learned from {listed(seen)}"
        )
    if record is None:
        told = f"nothing says what {start} has seen: if these scans, the figures are worth nothing"
        console.print(f"[yellow]{told}[/yellow]", highlight=False)


def start_of(options: Options, folds: Folds, number: int, second: bool) -> Path | None:
    """Say whose weights a fold starts from: those of the same fold if the other model has it."""
    start = options.start
    if start is None:
        return None
    model = start.parent if second else start
    theirs = read_folds(model)
    if theirs is None or theirs.members != folds.members:
        return start
    fold = theirs.folder(model, number)
    return fold / start.name if second else fold


def do_fold(
    options: Options,
    folds: Folds,
    number: int,
    trainer: Trainer,
    checked: Checked,
    console: Console,
) -> bool:
    """Train without a fold and measure on it, unless that is done; says whether it is.

    Raises:
        StartupError: It was begun otherwise.
    """
    names, folder = folds.members[number - 1], folds.folder(options.folder, number)
    start = start_of(options, folds, number, trainer.second)
    mine = replace(options, folder=folder, hold_out=names, train_only=(), start=start)
    hidden = folds.without(number) - set(names)
    seen = tuple(facts for facts in checked.specimens if facts.name not in hidden)
    plan = trainer.plan(mine, replace(checked, specimens=seen))
    done = (plan.folder / OUTCOMES).exists()
    if done or (plan.folder / CHECKPOINT).exists():
        check_same(plan.folder, plan.record, options.folder / FOLDS)
    told = "is done" if done else f"without {listed(names, most=8)}"
    console.print(f"fold {number} of {len(folds.members)}: {told}", highlight=False)
    if done:
        return True
    if not trainer.run(mine, plan, console):
        return False
    detector = Detector(load_checked(folder, choose_device(options.device)))
    pairs = [facts.pair for facts in plan.chosen.held_out]
    outcomes, failures = measure(detector, pairs, console, missing_of(folder))
    write_outcomes(plan.folder, outcomes, failures)
    return True


def missing_of(folder: Path) -> Missing:
    """Say what a landmark without a position was when a folder's first network was trained."""
    record = read_record(folder)
    return "absent" if record and record["recipe"]["missing"] == "absent" else "unknown"


def gather_folds(options: Options, folds: Folds, second: bool) -> Pooled:
    """Put together what the models of all folds answered.

    Raises:
        StartupError: A fold's answers are gone, or none of its scans was answered.
    """
    outcomes: list[Outcome] = []
    failures: list[str] = []
    for number in range(1, len(folds.members) + 1):
        folder = folds.folder(options.folder, number)
        measured = read_outcomes(folder / REFINE if second else folder)
        if measured is None:
            raise StartupError(f"expected {OUTCOMES} of fold {number} in {folder}, found none")
        outcomes += measured.outcomes
        failures += measured.failures
    return Pooled(options.folder, folds, tuple(outcomes), tuple(failures), second)
