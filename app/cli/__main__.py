"""The command ``landmarkd``; also ``python -m app.cli``, where it is not installed."""

from app.cli import INTERRUPTED


def main() -> None:
    """Run the command; to import it takes so long that Ctrl-C may come meanwhile."""
    try:
        from app.cli.main import main as run  # noqa: PLC0415 - within the try
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    run()


if __name__ == "__main__":
    main()
