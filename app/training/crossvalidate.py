"""Cross-validation: K models, each trained without one fold, measured on it; then one of all scans.

With 10 to 30 annotated scans, none can be spared for testing. The error of the K models on the
folds that they were not trained on estimates that of a model trained alike on all scans, a little
pessimistically, as that one learns from more.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from app.errors import BadParameter, StartupError
from app.training.data.check_data import CheckedData
from app.training.data.folds import (
    Folds,
    check_same_data,
    content_digests,
    make_folds,
    read_folds,
    save_folds,
    untrained_landmarks,
)
from app.training.data.issues import LINE_NAMES, print_warning, shorten
from app.training.evaluate.crossvalidation import PooledOutcomes, report_pooled, write_card_section
from app.training.evaluate.outcomes import Outcome, read_outcomes
from app.training.files import CHECKPOINT, FOLDS, OUTCOMES
from app.training.fit.suggest import Choice
from app.training.options import Options
from app.training.pipeline import (
    check_and_report,
    options_as_before,
    plan_network,
    print_choices,
    run,
)
from app.training.record import check_same, read_record, refuse_finished, seen_by


def crossvalidate(options: Options, console: Console, only_check: bool = False) -> bool:
    """Train a network once without each fold, measure it on that fold, and train it on all scans.

    Finished folds are not trained again, and an interrupted training is resumed.

    Returns:
        Whether everything is done; False if it was interrupted.

    Raises:
        StartupError: The data are wrong or have changed, or the folder holds another training, or a
            finished model.
        BadParameter: There cannot be such folds.
    """
    if not only_check and options.fold is None:
        refuse_finished(options.network_folder)
    checked = check_and_report(options, console)
    folds = choose_folds(options, checked)
    check_warm_start(options, folds, console)
    on_all = replace(options, hold_out=())
    plan = plan_network(on_all, checked)
    if (plan.folder / CHECKPOINT).exists():
        # Now, and not after hours of folds.
        check_same(plan.folder, plan.record, plan.folder)
    print_choices(console, plan.split, [fold_choice(folds), *plan.choices])
    warn_of_untrained(folds, checked, console)
    if only_check:
        return True
    save_folds(options.folder, folds)
    fixed = options_as_before(on_all, plan.record.to_json())
    every = range(1, len(folds.members) + 1)
    numbers: Sequence[int] = every if options.fold is None else [options.fold]
    for number in numbers:
        if not train_fold(fixed, folds, number, checked, console):
            return False
    if options.fold is not None:
        return True
    pooled = pool_folds(options, folds)
    in_folds = folds.by_scan()
    files = [specimen.files for specimen in checked.specimens if specimen.name in in_folds]
    report_pooled(pooled, files, console)
    console.print(f"now {options.folder}, on all {len(folds.digests)} scans")
    if not run(plan, console):
        return False
    write_card_section(pooled)
    return True


def choose_folds(options: Options, checked: CheckedData) -> Folds:
    """Choose the folds; for a second network, take those of the first.

    Raises:
        BadParameter: There cannot be so many folds; or the first network has others, or none.
        StartupError: The data have changed since the first network's folds.
    """
    if (count := options.folds) is None:
        raise BadParameter("--fold: expected --folds beside it, the number of all folds")
    if options.hold_out:
        raise BadParameter("--folds holds out every scan in turn: expected no --validate beside it")
    if options.inner:
        folds = folds_of_first(options, checked, count)
    else:
        subject, train_only = options.subject, options.train_only
        folds = make_folds(checked.specimens, count, options.seed, subject, train_only)
    if options.fold is not None and not 1 <= options.fold <= count:
        raise BadParameter(f"--fold: expected one of 1 to {count}, got {options.fold}")
    return folds


def folds_of_first(options: Options, checked: CheckedData, count: int) -> Folds:
    """Read the folds of the first network, all of which must be finished, as must the network.

    Raises:
        BadParameter: The first network has others, or none, or is not finished.
        StartupError: The data have changed since.
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
    check_same_data(options.folder, folds, content_digests(checked.specimens))
    for number in range(1, count + 1):
        folder = folds.folder(options.folder, number)
        if not (folder / OUTCOMES).exists():
            raise BadParameter(
                f"--folds: expected all folds of the first network to be done, {folder} is not: "
                "repeat the command that started it"
            )
    if not (options.folder / "model.toml").exists():
        raise BadParameter(
            f"--folds: expected a first network of all scans, too, found none in {options.folder}: "
            "repeat the command that trained its folds, without --fold"
        )
    return folds


def warn_of_untrained(folds: Folds, checked: CheckedData, console: Console) -> None:
    """Warn of landmarks that will count as missed, as only scans of one fold have them."""
    landmarks = untrained_landmarks(folds, checked.specimens)
    if landmarks:
        message = f"only scans of one fold have {shorten(landmarks)}: its model cannot learn them"
        print_warning(message, console)


def fold_choice(folds: Folds) -> Choice:
    """Describe the folds for the table of choices."""
    each = "; ".join(shorten(names, LINE_NAMES) for names in folds.members)
    subject_of = folds.held_out_subjects()
    subjects = len(set(subject_of.values()))
    together = f", scans of {subjects} subjects kept together" if subjects < len(subject_of) else ""
    more = len(folds.subjects) - len(subject_of)
    rest = f"; {more} more {'is' if more == 1 else 'are'} only trained on" if more else ""
    return Choice("--folds", str(len(folds.members)), f"each held out once{together}: {each}{rest}")


def check_warm_start(options: Options, folds: Folds, console: Console) -> None:
    """Refuse to start from weights that were trained on scans which a fold holds out.

    Raises:
        BadParameter: They were, or are those of folds that are not finished.
    """
    start = options.start
    if start is None:
        return
    numbers = range(1, len(folds.members) + 1)
    starts = [fold_start(options, folds, number) or start for number in numbers]
    if start not in starts:
        unfinished = [str(path) for path in starts if not (path / OUTCOMES).exists()]
        if unfinished:
            raise BadParameter(
                f"--start: expected folds that are done, {shorten(unfinished)} are not"
            )
        return
    record = read_record(start)
    excluded = {name for number in numbers for name in folds.excluded(number)}
    leaked = sorted(seen_by(record) & excluded)
    if leaked:
        raise BadParameter(
            f"--start with --folds: expected weights that were trained on none of these scans, or "
            f"a model with the same folds; {start} was trained on {shorten(leaked)}"
        )
    if not record:
        message = (
            f"nothing says what {start} was trained on: if on these scans, the errors mean nothing"
        )
        print_warning(message, console)


def fold_start(options: Options, folds: Folds, number: int) -> Path | None:
    """Return whose weights a fold starts from: those of the same fold if the model has it."""
    start = options.start
    if start is None:
        return None
    model = start.parent if options.inner else start
    other = read_folds(model)
    if other is None or other.members != folds.members:
        return start
    fold = other.folder(model, number)
    return fold / start.name if options.inner else fold


def train_fold(
    options: Options, folds: Folds, number: int, checked: CheckedData, console: Console
) -> bool:
    """Train without a fold, and so measure on it, unless that is done.

    Returns:
        Whether it is done; False if it was interrupted.

    Raises:
        StartupError: It was started with something else.
    """
    names, folder = folds.members[number - 1], folds.folder(options.folder, number)
    start = fold_start(options, folds, number)
    fold_options = replace(options, folder=folder, hold_out=names, train_only=(), start=start)
    hidden = folds.excluded(number) - set(names)
    specimens = tuple(one for one in checked.specimens if one.name not in hidden)
    plan = plan_network(fold_options, replace(checked, specimens=specimens))
    done = (plan.folder / OUTCOMES).exists()
    if done or (plan.folder / CHECKPOINT).exists():
        check_same(plan.folder, plan.record, options.folder / FOLDS)
    state = "is done" if done else f"without {shorten(names, LINE_NAMES)}"
    console.print(f"fold {number} of {len(folds.members)}: {state}", highlight=False)
    return done or run(plan, console)


def pool_folds(options: Options, folds: Folds) -> PooledOutcomes:
    """Pool the outcomes of all folds.

    Raises:
        StartupError: Those of a fold are gone.
    """
    outcomes: list[Outcome] = []
    failures: list[str] = []
    for number in range(1, len(folds.members) + 1):
        folder = folds.folder(options.folder, number) / options.inner
        measured = read_outcomes(folder)
        if measured is None:
            raise StartupError(
                f"expected {OUTCOMES} of fold {number} in {folder}, found none: delete its "
                f"{CHECKPOINT}, and repeat the command"
            )
        outcomes += measured.outcomes
        failures += measured.failures
    is_refine = bool(options.inner)
    return PooledOutcomes(options.folder, folds, tuple(outcomes), tuple(failures), is_refine)
