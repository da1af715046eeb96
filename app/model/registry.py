"""models folder -> LoadedModels: validate, load, and hot-reload.

A folder that breaks the contract is refused with the key and the reason, and the others serve on.
Nothing here touches a device by itself: whoever owns one is given what touches it.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from app.compute import OnDevice, call_here, fast_precisions
from app.errors import BadParameter, ModelRefused, StartupError, UnknownModel
from app.model.files import read_text
from app.model.loader import ONNX_SUFFIX, load_module
from app.model.manifest import Manifest, parse_manifest
from app.model.mean_shape import Shape, load_shape
from app.model.network import Network
from app.model.sections import WHOLE, LowerPrecision
from app.model.selfcheck import Samples, load_samples
from app.model.versions import choose_version, newest_first, split_name

Precision: TypeAlias = Literal["float32"] | LowerPrecision
PrecisionSetting: TypeAlias = Precision | Literal["auto"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a device. Nothing is read from its folder any more.

    Attributes:
        manifest: What it promises.
        network: What keeps the promise.
        shape: Mean shape of its landmarks, for the constellation; None if the folder has none.
        expected: What its self-check compares with; None if it is checked by a phantom.
        digest: SHA-256 over its ``model.toml`` and the hash of its weights.
        card: Text of its README.md; empty if it has none.
        refine: The model that looks again in the subject's pose; None if there is none.
        copies: The same model on each device of a process that has several, by the device's index.
    """

    manifest: Manifest
    network: Network
    shape: Shape | None
    expected: Samples | None
    digest: str
    card: str
    refine: "LoadedModel | None" = None
    copies: "Mapping[int, LoadedModel]" = field(default_factory=dict)

    def on(self, index: int) -> "LoadedModel":
        """Return the copy on the device of an index; itself where there is but one device."""
        return self.copies.get(index, self)


def scan_models(root: Path) -> list[Path]:
    """List the model folders under a root, by name: subfolders with a ``model.toml``.

    Those whose names start with ``_`` or a dot are skipped.

    Raises:
        StartupError: The root is not a folder, or cannot be read.
    """
    try:
        if not root.is_dir():
            raise StartupError(
                f"expected a folder of models, {root.name!r} is none; name one with --models-dir "
                "or LANDMARKD_MODELS_DIR (the package installs none; those of the project are in "
                "models/ of its source)"
            )
        folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] not in "_."]
    except OSError as error:
        raise StartupError(
            f"expected a folder of models to read, got {root.name!r}: {error.strerror}"
        ) from error
    return sorted(path for path in folders if _has_manifest(path))


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / "model.toml").is_file()
    except PermissionError:
        return True  # Loading it will say what is wrong.


def load_model(
    folder: Path,
    device: torch.device,
    precision: PrecisionSetting = "float32",
    *,
    allow_torchscript: bool = False,
    on_device: OnDevice = call_here,
) -> LoadedModel:
    """Load a model folder: read it, build its networks, and move them to a device.

    Args:
        folder: The model folder.
        device: Where the networks shall run.
        precision: What they shall compute in; ``auto``: see ``choose_precision``.
        allow_torchscript: Whether programs may be TorchScript.
        on_device: Calls what touches the device on the thread that owns it.

    Returns:
        The model; its self-check has not run yet.

    Raises:
        ModelRefused: The folder breaks the contract; the key and the reason are named.
    """

    def load(folder: Path, text: str, setting: PrecisionSetting) -> LoadedModel:
        manifest = parse_manifest(folder.name, text)
        chosen = choose_precision(manifest, device, setting)
        refine = None
        if manifest.refine is not None:
            name, sha256 = f"{manifest.refine.folder}/model.toml", manifest.refine.sha256
            inner = read_text(folder, name, "refine.folder", sha256)
            refine = load(folder / manifest.refine.folder, inner, chosen)
            _check_refine(manifest, refine)
        module = load_module(folder, manifest, allow_torchscript=allow_torchscript)
        dtype: torch.dtype = getattr(torch, chosen)
        return LoadedModel(
            manifest=manifest,
            network=on_device(lambda: Network(manifest, module, device, dtype)),
            shape=load_shape(folder, manifest),
            expected=load_samples(folder, manifest),
            digest=hashlib.sha256(text.encode() + manifest.network.sha256.encode()).hexdigest(),
            card=read_text(folder, "README.md") if (folder / "README.md").exists() else "",
            refine=refine,
        )

    return load(folder, read_text(folder, "model.toml"), precision)


def choose_precision(
    manifest: Manifest, device: torch.device, setting: PrecisionSetting
) -> Precision:
    """Choose the precision that a model computes in: by a fixed rule, never by a clock.

    ``auto`` takes the first precision below float32 that the device computes natively *and* the
    model was verified in (``[precision]`` of its ``model.toml``); float32 otherwise. So the same
    model gives the same answer in every process on the same kind of device.
    """
    if (manifest.network.program or "").endswith(ONNX_SUFFIX):
        return "float32"  # What it computes in is fixed in the file.
    if setting != "auto":
        return setting
    native = fast_precisions(device)
    return next((name for name in manifest.precision.verified if name in native), "float32")


def _check_refine(manifest: Manifest, refine: LoadedModel) -> None:
    """Refuse a second model that does not fit the one that it belongs to."""
    key = f"{manifest.name}: refine"
    names = [landmark.name for landmark in manifest.landmarks]
    found = [landmark.name for landmark in refine.manifest.landmarks]
    if found != names:
        raise ModelRefused(f"{key}: expected the landmarks {names}, got {found}")
    if refine.shape is None or refine.manifest.refine is not None:
        raise ModelRefused(f"{key}: expected a section shape and no section refine")
    if refine.manifest.input.tile_shape == WHOLE:
        raise ModelRefused(f"{key}: expected input.tile_shape in voxels, got {WHOLE!r}")
    if refine.manifest.network.output == "coordinates":
        raise ModelRefused(f"{key}: expected network.output votes or heatmaps, got coordinates")
    if refine.manifest.network.mirror:
        # In the frame of the mean shape, left and right may lie along any direction.
        raise ModelRefused(
            f"{key}: expected no network.mirror, got {refine.manifest.network.mirror}"
        )
    if refine.manifest.selfcheck.is_phantom:
        raise ModelRefused(f"{key}: expected selfcheck.input noise, got a phantom")


class Registry:
    """The models that serve, and why others do not.

    One thread may load while others read: every change puts a new mapping in the place of the old.

    Attributes:
        models: The models that serve, by the name of their folder.
        refusals: Why a folder does not serve, or not in its newest state, by its name.
    """

    def __init__(
        self, root: Path, load: Callable[[Path], LoadedModel], default: str | None = None
    ) -> None:
        """Remember where models are and how to load one; nothing is loaded yet.

        Args:
            root: The folder of model folders.
            load: Loads one folder; called in whatever thread calls ``load_all`` or ``reload``.
            default: Name of the model for requests that name none.
        """
        self._root = root
        self._load = load
        self._default = default
        self.models: Mapping[str, LoadedModel] = {}
        self.refusals: Mapping[str, str] = {}

    @property
    def names(self) -> frozenset[str]:
        """All names that ``get`` knows."""
        manifests = [model.manifest for model in self.models.values()]
        pinned = (f"{manifest.name}@{manifest.version}" for manifest in manifests)
        return frozenset((*(manifest.name for manifest in manifests), *pinned))

    def load_all(self) -> None:
        """Load every folder; one that is refused is noted and stops no other.

        Raises:
            StartupError: As ``scan_models``.
        """
        for folder in scan_models(self._root):
            with suppress(ModelRefused):
                self._store(folder)

    def get(self, name: str | None = None) -> LoadedModel:
        """Find a model.

        Args:
            name: Its name, or ``NAME@VERSION``; without a version the newest is meant. None for the
                default, or for the only one loaded.

        Raises:
            BadParameter: No name and no default, but several models.
            UnknownModel: None of that name, or none at all, is loaded.
        """
        models = self.models
        wanted = name or self._default
        known = ", ".join(newest_first(models)) or "none"
        if wanted is None:
            names = {model.manifest.name for model in models.values()}
            if not names:
                raise UnknownModel("expected a loaded model, got a service that has none")
            if len(names) > 1:
                raise BadParameter(
                    f"model: expected one of {known}; got none (in a query model=, in a command -m)"
                )
            wanted = names.pop()
        folder = choose_version(
            wanted,
            ((key, one.manifest.name, one.manifest.version) for key, one in models.items()),
        )
        if folder is not None:
            return models[folder]
        if split_name(wanted)[1] is not None:
            versions = {f"{one.manifest.name}@{one.manifest.version}" for one in models.values()}
            known = ", ".join(newest_first(versions)) or "none"
        why = self.refusals.get(wanted)
        tail = f", which was refused: {why}" if why else ""
        raise UnknownModel(f"expected one of {known}; got {wanted[:64]!r}{tail}")

    def reload(self, name: str) -> LoadedModel:
        """Load a folder, old or new; a model serves until its successor has passed its self-check.

        Raises:
            UnknownModel: There is no such folder; a model that was loaded from it serves no more.
            ModelRefused: The folder breaks the contract; the old model, if any, stays.
        """
        folders = {folder.name: folder for folder in scan_models(self._root)}
        if name not in folders:
            if name in self.models and not (self._root / name).exists():
                self.models = {key: one for key, one in self.models.items() if key != name}
            self._forget_refusal(name)
            known = ", ".join(folders) or "none"
            raise UnknownModel(f"expected a model folder, got {name!r}; found: {known}")
        return self._store(folders[name])

    def _store(self, folder: Path) -> LoadedModel:
        """Load a folder and put its model in place, or note why it is refused."""
        try:
            loaded = self._load(folder)
        except ModelRefused as refusal:
            self.refusals = {**self.refusals, folder.name: str(refusal)}
            raise
        self.models = {**self.models, folder.name: loaded}
        self._forget_refusal(folder.name)
        return loaded

    def _forget_refusal(self, folder: str) -> None:
        self.refusals = {name: why for name, why in self.refusals.items() if name != folder}
