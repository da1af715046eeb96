"""app/engine."""

from app.engine.devices import DeviceState
from app.engine.engine import QUEUED_VOLUMES, Engine
from app.engine.jobs import Progress
from app.engine.metrics import METRICS_MEDIA_TYPE, Metrics

__all__ = [
    "METRICS_MEDIA_TYPE",
    "QUEUED_VOLUMES",
    "DeviceState",
    "Engine",
    "Metrics",
    "Progress",
]
