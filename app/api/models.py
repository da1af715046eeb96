"""Engine -> what clients are told of its models."""

from app.engine import DeviceState, Engine
from app.io import (
    BatchInfo,
    DeviceInfo,
    LandmarkInfo,
    ModelInfo,
    ModelsAnswer,
    ModelSummary,
)

READY = "ready"


def list_models(engine: Engine) -> ModelsAnswer:
    """List all model folders, loaded or refused, by name."""
    states = engine.readiness().models
    loaded = engine.registry.models
    summaries = []
    for name in sorted({*states, *loaded, *engine.registry.refusals}):
        model = loaded.get(name)
        summaries.append(
            ModelSummary(
                name=name,
                status=states.get(name) or engine.registry.refusals.get(name, READY),
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
    model = engine.registry.get(name)
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
        verified_mm=dict(manifest.precision.verified),
        devices=[_device(state) for state in engine.devices.states(model)],
        card=model.card or None,
    )


def _device(state: DeviceState) -> DeviceInfo:
    batches = [
        BatchInfo(
            tile_shape=timing.tile_shape,
            tiles=timing.tiles,
            seconds=timing.seconds,
            chosen=timing.chosen,
        )
        for timing in state.timings
    ]
    model = state.model
    return DeviceInfo(
        name=state.name,
        status=state.trouble or READY,
        precision=model.network.precision,
        batches=batches,
    )
