"""models folder -> LoadedModels: validate, load, check, and hot-reload.

A folder that breaks the contract is refused with the key and the reason, and the others serve on.
Nothing here touches a device by itself: the registry is given a function that loads one folder, so
whoever owns the device decides where that runs.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

from app.compute import is_out_of_memory
from app.errors import BadParameter, InsufficientMemory, ModelRefused, StartupError, UnknownModel
from app.geometry import Points
from app.model.files import decode_text, read_text, read_verified
from app.model.loader import load_module
from app.model.manifest import WHOLE, Manifest, parse_manifest
from app.model.mean_shape import Mean, load_shape
from app.model.network import Network
from app.model.precision import Precision, PrecisionSetting, choose_precision, set_precision
from app.model.selfcheck import check


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has passed its self-check.

    Attributes:
        manifest: What it promises.
        network: What keeps the promise.
        shape: Mean landmark positions in mm, for the constellation; None if the folder has none.
        digest: SHA-256 over its ``model.toml`` and the hash of its weights.
        card: Text of its README.md; empty if it has none.
        refine: The model that looks again in the subject's pose; None if there is none.
        copies: The same model on each device of a process that has several, by the device's place.
    """

    manifest: Manifest
    network: Network
    shape: Mean | None
    digest: str
    card: str
    refine: "LoadedModel | None" = None
    copies: "Mapping[int, LoadedModel]" = field(default_factory=dict)

    def on(self, place: int) -> "LoadedModel":
        """Give the copy on the device of a place; itself where there is but one device."""
        return self.copies.get(place, self)


DetectWith = Callable[[LoadedModel, int], tuple[Points, Points]]
"""Runs a model on the phantom of a seed; gives the points found and the true ones, RAS mm."""


def scan_models(root: Path) -> list[Path]:
    """List the model folders under a root: subfolders with a ``model.toml``.

    Those whose names start with ``_`` or a dot are skipped.

    Args:
        root: The folder of model folders.

    Returns:
        The folders, sorted by name.

    Raises:
        StartupError: The root is not a folder.
    """
    if not root.is_dir():
        raise StartupError(f"expected a folder of models, {root.name!r} is none")
    folders = (path for path in root.iterdir() if path.is_dir() and path.name[0] not in "_.")
    return sorted(path for path in folders if _has_manifest(path))


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / "model.toml").is_file()
    except PermissionError:
        return True  # Loading it will say what is wrong.


def load_model(
    folder: Path,
    device: torch.device,
    detect: DetectWith | None = None,
    precision: PrecisionSetting = "float32",
    *,
    allow_torchscript: bool = False,
) -> LoadedModel:
    """Load a model folder and run its self-check.

    Args:
        folder: The model folder.
        device: Where the network shall run.
        detect: The whole pipeline, for models that are checked by a phantom.
        precision: What the networks shall compute in; ``auto``: see ``app.model.precision``.
        allow_torchscript: Whether programs may be TorchScript.

    Returns:
        The model.

    Raises:
        ModelRefused: The folder breaks the contract; the key and the reason are named.
    """
    try:
        text = read_text(folder, "model.toml")
        return _load(folder, text, device, detect, precision, allow_torchscript=allow_torchscript)
    except ModelRefused:
        raise
    except Exception as error:
        # Whatever it is, it must not keep the other folders from being loaded.
        raise ModelRefused(f"{folder.name}: {_reason(error, device)}") from error


def _reason(error: Exception, device: torch.device) -> str:
    """Say why loading failed, without paths: the message of an OSError may hold one."""
    if isinstance(error, OSError):
        return f"expected files to read, got {error.strerror}"
    if isinstance(error, InsufficientMemory) or is_out_of_memory(error):
        return f"expected to fit on {device}, ran out of memory"
    first_line = str(error).strip().partition("\n")[0]
    return f"expected to load, got {type(error).__name__}: {first_line:.200}"


def _load(
    folder: Path,
    text: str,
    device: torch.device,
    detect: DetectWith | None,
    setting: PrecisionSetting,
    *,
    allow_torchscript: bool,
) -> LoadedModel:
    """Load the folder of a manifest with this text."""
    manifest = parse_manifest(folder.name, text)
    shape = load_shape(folder, manifest)
    module = load_module(folder, manifest, allow_torchscript=allow_torchscript)
    network = Network(manifest, module, device)
    digest = hashlib.sha256(text.encode() + manifest.network.sha256.encode()).hexdigest()
    card = read_text(folder, "README.md") if (folder / "README.md").exists() else ""
    precision = choose_precision(manifest, device, setting)
    refine = _load_refine(folder, manifest, device, precision, allow_torchscript=allow_torchscript)
    loaded = LoadedModel(manifest, network, shape, digest, card, refine)

    def verify(network: Network) -> None:
        tried = replace(loaded, network=network)
        check(folder, manifest, network, detect and (lambda seed: detect(tried, seed)))

    return replace(loaded, network=set_precision(manifest, network, precision, verify))


def _load_refine(
    folder: Path,
    manifest: Manifest,
    device: torch.device,
    precision: Precision,
    *,
    allow_torchscript: bool,
) -> LoadedModel | None:
    """Load the model that looks again; it must fit the one that it belongs to."""
    if manifest.refine is None:
        return None
    key = f"{folder.name}: refine"
    inner = folder / manifest.refine.folder
    name, sha256 = f"{manifest.refine.folder}/model.toml", manifest.refine.sha256
    text = decode_text(folder, name, read_verified(folder, "refine", "folder", name, sha256))
    loaded = _load(inner, text, device, None, precision, allow_torchscript=allow_torchscript)
    names = [landmark.name for landmark in manifest.landmarks]
    found = [landmark.name for landmark in loaded.manifest.landmarks]
    if found != names:
        raise ModelRefused(f"{key}: expected the landmarks {names}, got {found}")
    if loaded.shape is None or loaded.manifest.refine is not None:
        raise ModelRefused(f"{key}: expected a section shape and no section refine")
    if loaded.manifest.input.tile_shape == WHOLE:
        raise ModelRefused(f"{key}: expected input.tile_shape in voxels, got {WHOLE!r}")
    return loaded


class Registry:
    """The models that serve, and why others do not.

    Reading takes no lock: every change puts a new mapping in the place of the old one.
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
        self._lock = threading.Lock()
        self._models: Mapping[str, LoadedModel] = MappingProxyType({})
        self._refusals: Mapping[str, str] = MappingProxyType({})

    @property
    def models(self) -> Mapping[str, LoadedModel]:
        """The models that serve, by name."""
        return self._models

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why a folder does not serve, or not in its newest state, by name."""
        return self._refusals

    def load_all(self) -> None:
        """Load every folder; one that is refused is noted and stops no other.

        Raises:
            StartupError: The root is not a folder.
        """
        for folder in scan_models(self._root):
            try:
                self._store(folder.name, self._load(folder))
            except ModelRefused as refusal:
                self._refuse(folder.name, refusal)

    def get(self, name: str | None = None) -> LoadedModel:
        """Find a model.

        Args:
            name: Its name; None for the default, or for the only one loaded.

        Returns:
            The model.

        Raises:
            BadParameter: No name and no default, but several models.
            UnknownModel: None of that name, or none at all, is loaded.
        """
        models = self._models
        wanted = name or self._default
        known = ", ".join(sorted(models)) or "none"
        if wanted is None:
            if len(models) == 1:
                return next(iter(models.values()))
            if not models:
                raise UnknownModel("expected a loaded model, got a service that has none")
            raise BadParameter(f"model: expected one of {known}; got none")
        if wanted in models:
            return models[wanted]
        why = self._refusals.get(wanted)
        tail = f", which was refused: {why}" if why else ""
        raise UnknownModel(f"expected one of {known}; got {wanted[:64]!r}{tail}")

    def reload(self, name: str) -> LoadedModel:
        """Load a folder anew; the old model serves until the new one has passed its self-check.

        Args:
            name: The folder's name; it may be new.

        Returns:
            The new model.

        Raises:
            UnknownModel: There is no such folder.
            ModelRefused: The folder breaks the contract; the old model, if any, stays.
        """
        folders = {folder.name: folder for folder in scan_models(self._root)}
        if name not in folders:
            known = ", ".join(folders) or "none"
            raise UnknownModel(f"expected a model folder, got {name!r}; found: {known}")
        try:
            loaded = self._load(folders[name])
        except ModelRefused as refusal:
            self._refuse(name, refusal)
            raise
        self._store(name, loaded)
        return loaded

    def _store(self, name: str, loaded: LoadedModel) -> None:
        """Put a model in place, and forget why its folder was refused before."""
        with self._lock:
            self._models = MappingProxyType({**self._models, name: loaded})
            reasons = {key: why for key, why in self._refusals.items() if key != name}
            self._refusals = MappingProxyType(reasons)

    def _refuse(self, name: str, refusal: ModelRefused) -> None:
        """Note why a folder was refused."""
        with self._lock:
            self._refusals = MappingProxyType({**self._refusals, name: str(refusal)})
