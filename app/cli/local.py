"""Finds landmarks in this process, with the settings and the answers of the service."""

import time
import uuid
from dataclasses import replace
from pathlib import Path

from app.cli.terminal import console
from app.compute import choose_device, has_compiled_loops, limit_threads
from app.errors import BadParameter, UnknownModel
from app.inference import Detector, answer_scan, load_checked, model_ref
from app.io import LandmarksAnswer, Selection, VolumeLimits, read_volume
from app.model import LoadedModel, choose_version, read_manifest, scan_models, split_name
from app.settings import Settings, spell_out


def load_model(folder: Path, settings: Settings) -> LoadedModel:
    """Load a model folder as the service does, on its first device; sets the number of threads.

    Raises:
        ModelRefused: The folder cannot be used.
        StartupError: This machine has no such device, or lets no thread start.
    """
    limit_threads(settings.threads)
    if console.is_terminal and not has_compiled_loops():
        console.print("Compiling loops: once on this machine, for half a minute or more.")
    allow = settings.allow_torchscript
    device = choose_device(settings.device)
    return load_checked(folder, device, settings.precision, allow_torchscript=allow)


def find_folder(settings: Settings, model: str | None) -> Path:
    """Find the folder of a model, as the service chooses one.

    Args:
        settings: The service's.
        model: Its name, or ``NAME@VERSION``, or the path of its folder, as ``train`` has it; None
            for the default model, or for the only one.

    Raises:
        BadParameter: No name, and several models.
        UnknownModel: There is no such model.
        ModelRefused: The version of one of several folders of that name cannot be read.
    """
    wanted = model or settings.default_model
    if wanted is not None and not {"/", "\\"}.isdisjoint(wanted):
        return spell_out(Path(wanted))
    folders = {folder.name: folder for folder in scan_models(settings.models_dir)}
    known = ", ".join(folders) or "none"
    if wanted is None:
        names = {split_name(name)[0] for name in folders}
        if len(names) != 1:
            raise BadParameter(f"-m: expected the name of a model; found: {known}")
        wanted = names.pop()
    fitting = [one for one in folders if split_name(one)[0] == split_name(wanted)[0]]
    if fitting == [wanted]:
        return folders[wanted]  # Whatever is wrong with it, loading it says.
    manifests = {name: read_manifest(folders[name]) for name in fitting}
    chosen = choose_version(wanted, ((key, m.name, m.version) for key, m in manifests.items()))
    if chosen is None:
        raise UnknownModel(f"expected a model folder, got {wanted!r}; found: {known}")
    return folders[chosen]


class LocalDetector:
    """A model that is used without a service.

    Args:
        settings: The service's.
        model: Its name; None for the default model, or for the only one.

    Attributes:
        ref: The model, as its answers name it.

    Raises:
        LandmarkdError: There is no such model, or it cannot be used.
    """

    def __init__(self, settings: Settings, model: str | None) -> None:
        self._model = load_model(find_folder(settings, model), settings)
        self.ref = model_ref(self._model)
        self._limits = VolumeLimits.of(settings)

    def detect(
        self, content: bytes, *, frame: int | None = None, series: int | None = None
    ) -> LandmarksAnswer:
        """Find the landmarks of a scan.

        Returns:
            The answer, with the candidates of every landmark.

        Raises:
            LandmarkdError: As the service would refuse the scan.
        """
        start = time.perf_counter()
        volume = read_volume(content, self._limits, Selection(frame=frame, series=series))
        decode_ms = 1e3 * (time.perf_counter() - start)
        found = Detector(self._model).detect(volume)
        detection = replace(found, timing=replace(found.timing, decode=decode_ms))
        return answer_scan(
            detection,
            self._model,
            request_id=uuid.uuid4().hex,
            receive_ms=0.0,
            start_s=start,
            candidates=True,
        )
