"""``python -m app.cli``: the command ``landmarkd``, where it is not installed."""

from app.cli.main import main

if __name__ == "__main__":
    main()
