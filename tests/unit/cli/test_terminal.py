"""What the command says of what goes wrong."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from app.cli import INTERRUPTED
from app.cli.batch import Files, detect_all
from app.cli.main import main
from tests.support.answers import make_answer
from tests.support.model_folders import make_model_folder


@pytest.mark.parametrize(
    ("words", "name"),
    [(("phantom",), "p.nii.gz"), (("pack", "{models}/toy", "-o"), "toy.zip")],
)
def test_an_output_that_cannot_be_written_is_a_clear_message(
    words: tuple[str, ...],
    name: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "nowhere" / name
    given = [word.format(models=models) for word in words]
    monkeypatch.setattr(sys, "argv", ["landmarkd", *given, str(target)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    expected = f"cannot read or write {target}: No such file or directory\n"
    assert capsys.readouterr().err == expected


def test_a_seed_that_is_none_is_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["phantom", str(tmp_path / "p.nii.gz"), "--seed", "-1"]
    monkeypatch.setattr(sys, "argv", ["landmarkd", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "greater than or equal to 0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --host ü.. --port 0", "expected a free address, but ü..:0 cannot be used ("),
        ("detect {scan} --url http://a..b", "expected a service at http://a..b, got no answer: "),
        ("detect {scan} --url anna:secret@a..b", "a service at http://a..b, got no answer: "),
        ("detect {scan} --url anna:secret@b:c", "the address of a service, got b:c (or those of"),
        (
            "detect {scan} --url=",
            "expected the address of a service, got http://\n",
        ),
    ],
)
def test_an_address_that_no_host_can_have_is_a_clear_message(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scan = tmp_path / "scan.nii"
    scan.write_bytes(b"no scan")
    monkeypatch.setattr(sys, "argv", ["landmarkd", *words.format(scan=scan).split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert message in said
    assert "secret" not in said


def test_names_are_listed_in_an_encoding_that_lacks_their_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "all.csv"
    table.write_text("scan,label,ras_x_mm,ras_y_mm,ras_z_mm\nł,1,1,2,3\n", encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "latin-1"))
    monkeypatch.setattr(sys, "argv", ["landmarkd", "export", str(table), "--format", "csv"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert rb"\u0142,1.000000" in printed.getvalue()


@pytest.mark.parametrize(
    ("name", "shown"),
    [("sub[/b].nii", "sub[/b].nii"), ("[left].nii", "[left].nii"), ("\x1b[2J.nii", r"\x1b[2J.nii")],
)
def test_the_name_of_a_scan_is_no_markup_and_commands_no_terminal(
    name: str, shown: str, tmp_path: Path
) -> None:
    """The first ended the bar, and the second lacked its only word there."""
    files = [
        tmp_path / "other" / Path(name).name,
        tmp_path / name,
    ]  # With folders, if they share it.
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    targets = {path: tmp_path / f"{number}.json" for number, path in enumerate(files)}
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, color_system=None, width=1000)
    answer = make_answer(["1"], np.zeros((1, 3)))
    tally = detect_all(files, lambda _: answer, Files(targets, lambda *_: b""), console)
    assert tally.scans == len(files)
    assert f"{shown}: 1 of 1 found" in said.getvalue()


def test_models_are_listed_with_their_whole_names_however_narrow_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a-model-of-a-long-name"
    make_model_folder(tmp_path, name)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "argv", ["landmarkd", "models", "--models-dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    assert "".join(line[2:].partition(" ")[0] for line in lines[3:-1]) == name


@pytest.mark.parametrize("command", ["check", "models"])
def test_a_model_that_is_refused_commands_no_terminal(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_model_folder(tmp_path)
    manifest = folder / "model.toml"
    arguments = "arguments = {"
    text = manifest.read_text()
    assert arguments in text
    manifest.write_text(text.replace(arguments, arguments + r'"\u001b[2J\u202e" = 1, '))
    given = (str(folder),) if command == "check" else ("--models-dir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "argv", ["landmarkd", command, *given])
    with pytest.raises(SystemExit):
        main()
    said = "".join(capsys.readouterr())
    assert said.replace("\n", "").isprintable()
    assert r"\x1b[2J\u202e" in said


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'app.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from app.cli.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, b"")
