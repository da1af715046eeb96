"""Engine -> what clients are told of its models."""

from app.engine import Engine
from app.errors import BadParameter, NotReady, UnknownModel
from app.registry import LoadedModel
from app.schemas import LandmarkInfo, ModelInfo, ModelRef, ModelsAnswer, ModelSummary

READY = "ready"


def find_model(engine: Engine, name: str | None, default: str | None) -> LoadedModel:
    """Find the model that a request means.

    Args:
        engine: Whose models these are.
        name: What the request says.
        default: What the settings say; None for the only model there is.

    Returns:
        The model.

    Raises:
        BadParameter: Neither says, and there are several.
        NotReady: No model is loaded.
        UnknownModel: No model of that name is loaded.
    """
    models = engine.registry.models
    wanted = name if name is not None else default
    if wanted is None and len(models) == 1:
        return next(iter(models.values()))
    if not models:
        raise NotReady("expected a loaded model, got none")
    known = ", ".join(sorted(models))
    if wanted is None:
        raise BadParameter(f"query.model: expected one of {known}; got none")
    if wanted in models:
        return models[wanted]
    refused = engine.registry.refused.get(wanted)
    why = f", which was refused: {refused}" if refused else ""
    raise UnknownModel(f"expected one of {known}; got {wanted[:64]!r}{why}")


def reference(model: LoadedModel) -> ModelRef:
    """Name a model so that nobody confuses it with another."""
    manifest = model.manifest
    return ModelRef(name=manifest.name, version=manifest.version, digest=model.digest)


def list_models(engine: Engine) -> ModelsAnswer:
    """List all model folders, loaded or refused, by name."""
    states = engine.readiness().models
    loaded = engine.registry.models
    summaries = []
    for name in sorted({*states, *loaded, *engine.registry.refused}):
        model = loaded.get(name)
        summaries.append(
            ModelSummary(
                name=name,
                status=states.get(name) or engine.registry.refused.get(name, READY),
                version=model.manifest.version if model else None,
                description=model.manifest.description if model else None,
                digest=model.digest if model else None,
                landmarks=len(model.manifest.landmarks) if model else None,
            )
        )
    return ModelsAnswer(models=summaries)


def describe_model(engine: Engine, name: str) -> ModelInfo:
    """Say what a model finds, on which grid, and how well.

    Args:
        engine: Whose model it is.
        name: Of the model.

    Returns:
        The description.

    Raises:
        UnknownModel: No model of that name is loaded.
    """
    model = engine.registry.models.get(name)
    if model is None:
        known = ", ".join(sorted(engine.registry.models)) or "none"
        why = engine.registry.refused.get(name)
        tail = f", which was refused: {why}" if why else ""
        raise UnknownModel(f"expected one of the loaded models ({known}); got {name[:64]!r}{tail}")
    manifest = model.manifest
    return ModelInfo(
        name=manifest.name,
        status=engine.readiness().models.get(name, READY),
        version=manifest.version,
        description=manifest.description,
        license=manifest.license,
        digest=model.digest,
        orientation=manifest.input.orientation,
        spacing_mm=manifest.input.spacing_mm,
        tile_shape=manifest.input.tile_shape,
        landmarks=[
            LandmarkInfo(
                name=landmark.name,
                description=landmark.description,
                mirror=landmark.mirror or None,
                presence_threshold=landmark.presence_threshold,
                region95_mm=landmark.region95_mm,
            )
            for landmark in manifest.landmarks
        ],
        card=model.card or None,
    )
