"""``/v1/models``: the models of the service, listed, described and loaded again."""

from contextlib import suppress
from typing import Final

from fastapi import APIRouter, Depends

from app.api.dependencies import SharedDep, require_admin_key, require_api_key
from app.api.openapi import problems
from app.engine import DeviceLoop, Engine
from app.errors import NotReady, UnknownModel
from app.io import (
    DeviceInfo,
    LandmarkInfo,
    ModelInfo,
    ModelsAnswer,
    ModelSummary,
)
from app.model import LoadedModel, newest_first

READY: Final = "ready"

models_router: Final = APIRouter(tags=["models"])


@models_router.get(
    "/v1/models",
    summary="List the models",
    dependencies=[Depends(require_api_key)],
    responses=problems(401),
)
async def list_models(shared: SharedDep) -> ModelsAnswer:
    """List all model folders: the default first, then the newest; those refused with the reason."""
    engine = shared.engine
    summaries = []
    statuses = engine.readiness().models
    models, default = engine.registry.models, None
    if shared.settings.default_model:
        with suppress(UnknownModel):  # it was refused, or is not loaded yet
            default = engine.registry.get()
    names = newest_first(statuses)
    if default is not None:
        names.sort(key=lambda name: models.get(name) is not default)
    for name in names:
        model = models.get(name)
        summaries.append(
            ModelSummary(
                name=name,
                status=statuses[name],
                version=model.manifest.version if model else None,
                description=model.manifest.description if model else None,
                digest=model.digest if model else None,
                landmarks=len(model.manifest.landmarks) if model else None,
            )
        )
    return ModelsAnswer(models=summaries, keeps_cases=shared.settings.store is not None)


@models_router.get(
    "/v1/models/{name}",
    summary="Describe a model",
    dependencies=[Depends(require_api_key)],
    responses=problems(401, 404, 503),
)
async def get_model(name: str, shared: SharedDep) -> ModelInfo:
    """Describe which landmarks a model finds, on which grid, and how well."""
    engine = shared.engine
    if not engine.loaded.is_set() and name not in engine.registry.names:
        raise NotReady(f"expected a model that is loaded, got {name[:64]!r} before all models are")
    return describe_model(engine, name, engine.registry.get(name))


@models_router.post(
    "/v1/models/{name}/reload",
    summary="Load a model again",
    dependencies=[Depends(require_admin_key)],
    responses=problems(401, 404, 409, 503),
)
async def reload_model(name: str, shared: SharedDep) -> ModelInfo:
    """Read a model's folder again; if it is refused, the loaded one stays, if it is gone, none."""
    await shared.engine.reload(name)
    if shared.jobs is not None:
        shared.jobs.resume()
    return describe_model(shared.engine, name, shared.engine.registry.models[name])


def describe_model(engine: Engine, name: str, model: LoadedModel) -> ModelInfo:
    """Describe a model under the name by which it was asked for.

    Where it has a second network, that one decides on presence and has the calibrated regions.
    """
    manifest = model.manifest
    answering = (model.refine or model).manifest.landmarks
    return ModelInfo(
        name=manifest.name,
        status=engine.readiness().models.get(name, READY),
        version=manifest.version,
        description=manifest.description,
        license=manifest.license,
        sample=manifest.sample,
        digest=model.digest,
        orientation=manifest.input.orientation,
        spacing_mm=manifest.input.spacing_mm,
        tile_shape=manifest.input.tile_shape,
        landmarks=[
            LandmarkInfo(
                name=landmark.name,
                description=landmark.description,
                mirror=landmark.mirror or None,
                presence_threshold=answered.presence_threshold,
                region95_mm=answered.region95_mm,
            )
            for landmark, answered in zip(manifest.landmarks, answering, strict=True)
        ],
        verified_mm=dict(manifest.precision.verified),
        devices=[_describe_device(loop, model) for loop in engine.devices.loops],
        card=model.card or None,
    )


def _describe_device(loop: DeviceLoop, model: LoadedModel) -> DeviceInfo:
    return DeviceInfo(
        name=loop.device.name,
        status=loop.unhealthy_reason or READY,
        precision=model.on(loop.index).network.precision,
        batches=loop.sizes.timings(model.digest),
    )
