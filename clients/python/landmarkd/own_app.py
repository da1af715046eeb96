"""The package ``app`` of which landmarkd is made, where a script or a service is called so, too.

A script ``app.py`` is ``__main__`` to Python when it runs, but its folder comes first where Python
looks for packages, so that ``import app`` within landmarkd would run the script once more.
"""

import sys
from importlib import import_module
from pathlib import Path


def import_app() -> None:
    """Import our package ``app``, whatever else is found by that name.

    Raises:
        ImportError: another module or package has been imported as ``app``, as where a service's
            own package is called so; one process cannot have both
    """
    # Beside this package as pip installs it, or above it in a checkout.
    place = next(
        folder
        for folder in Path(__file__).resolve().parents
        if (folder / "app" / "errors.py").is_file()
    )
    sys.path.insert(0, str(place))
    try:
        app = import_module("app")
    finally:
        sys.path.remove(str(place))
    if app.__file__ is None or Path(app.__file__).resolve().parent != place / "app":
        msg = (
            f"landmarkd is made of a package app ({place / 'app'}), but {app.__file__} has been "
            "imported by that name: rename it, or use landmarkd in a process of its own"
        )
        raise ImportError(msg)
