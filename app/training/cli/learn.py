"""``landmarkd learn``: the next version of a model, from kept cases."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from app.errors import BadParameter, LandmarkdError
from app.settings import API_KEY, NO_PROXY, bearer, hide_password, service_url, spell_out
from app.training.cli.arguments import FOLDER, Device, make_console, prepare
from app.training.cli.train import INTERRUPTED, SAVED, Rate

if TYPE_CHECKING:
    from app.training.learn import LearnOptions

WATCH_S: Final = 10.0
"""Between two looks at a store."""

RELOAD_S: Final = 120.0


Model = Annotated[Path, typer.Argument(help="A model folder.", callback=spell_out, **FOLDER)]
Cases = Annotated[
    Path | None, typer.Option("--from", metavar="STORE/NAME", help="The model's folder in a store.")
]
Old = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--with",
        metavar="SCANS LANDMARKS",
        help="Folders of what the model was trained on, so that it forgets nothing.",
    ),
]
Validate = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Old scans that the model was not trained on, besides those of recipe.json.",
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps of each network.")]
Watch = Annotated[
    bool, typer.Option("--watch", help="Go on, and learn again whenever cases have changed.")
]
Back = Annotated[
    bool, typer.Option("--back", help="Put the version before in place again, and stop.")
]
Url = Annotated[
    str | None,
    typer.Option(help=f"Service that shall load the new version; its admin key in {API_KEY}."),
]


def learn(
    model: Model,
    cases: Cases = None,
    old: Old = None,
    validate: Validate = None,
    steps: Steps = 1000,
    rate: Rate = 5e-4,
    watch: Watch = False,
    back: Back = False,
    url: Url = None,
    device: Device = "auto",
) -> None:
    """Let a model learn from corrected cases, and replace it only if it has become better.

    A third of the new cases is held out, and stays so. The next version is put in place, in one
    step, if its error on those is smaller with 95 % confidence; the one before stays beside it.
    """
    prepare()
    from app.training.learn import LearnOptions
    from app.training.options import read_names
    from app.training.versions import put_back

    console = make_console()
    if url is not None and not bearer(os.environ.get(API_KEY)):
        raise BadParameter(
            f"--url: expected the admin key of {hide_password(url)} in {API_KEY}, found none"
        )
    if back:
        now, before = put_back(model)
        console.print(f"version {before} is in place again, {now} is not", highlight=False)
        _reload(url, model, console)
        return
    if cases is None:
        raise BadParameter("expected --from STORE/NAME, a model's folder in a store, or --back")
    options = LearnOptions(model, cases, old, read_names(validate), steps, rate, device)
    if watch:
        _watch(options, url, console)
    elif _learn(options, console):
        _reload(url, model, console)


def _watch(options: "LearnOptions", url: str | None, console: Console) -> None:
    """Learn again and again; what cannot be learned from now may be later."""
    from app.training.data.issues import print_warning

    seen, is_behind = None, False
    while True:
        if (state := _state(options.cases)) == seen:
            time.sleep(WATCH_S)
        try:
            if state != seen:
                seen = state
                is_behind |= _learn(options, console)
            if is_behind:
                _reload(url, options.folder, console)
                is_behind = False
        except (LandmarkdError, OSError) as error:  # Cases may be deleted while it learns.
            print_warning(str(error), console)


def _learn(options: "LearnOptions", console: Console) -> bool:
    """Learn once, say what came of it, and return whether another version is in place."""
    from app.training.learn import learn

    compared = learn(options, console)
    if compared is None:
        console.print(SAVED)
        raise typer.Exit(INTERRUPTED)
    console.print(compared.describe(), highlight=False, soft_wrap=True)
    if not compared.is_better:
        reason = "the interval does not exclude that {} is no better; more cases may show it"
        if compared.high_mm < 0:
            reason = "{} is worse"
        console.print(
            f"version {compared.versions[0]} stays: {reason.format(compared.versions[1])}",
            highlight=False,
            soft_wrap=True,
        )
        return False
    console.print(
        f"version {compared.versions[1]} is in place; {compared.versions[0]} comes back with "
        f"landmarkd learn {options.folder} --back",
        highlight=False,
        soft_wrap=True,
    )
    return True


def _state(cases: Path) -> list[tuple[str, int]]:
    """Describe which cases there are, and when each was kept."""
    kept = []
    for path in (cases / "landmarks").glob("*.mrk.json"):
        with suppress(FileNotFoundError):  # removed meanwhile
            kept.append((path.name, path.stat().st_mtime_ns))
    return sorted(kept)


def _reload(url: str | None, model: Path, console: Console) -> None:
    """Let a service load the folder again; requests in progress finish on the old version."""
    if url is None:
        return
    import httpx

    headers = bearer(os.environ.get(API_KEY))
    address = hide_password(url)
    path = f"{service_url(url).rstrip('/')}/v1/models/{model.name}/reload"
    try:
        with httpx.Client(headers=headers, timeout=RELOAD_S, mounts=NO_PROXY) as client:
            response = client.post(path)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise BadParameter(f"--url: expected a service at {address}, got: {error}") from None
    if response.status_code != httpx.codes.OK:
        raise BadParameter(
            f"--url: expected {address} to load the version in place, got: {response.text}"
        )
    console.print(f"{address} has loaded it", highlight=False)
