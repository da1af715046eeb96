"""Many requests on a few devices: queueing, batching and deadlines; faults stay contained.

The threads, and the way of one upload through them. Each column is a kind of thread, each line a
function that runs there, each arrow a hand-over by the function at its beginning::

    event loop                  decode pool    host pool                 device worker
    1 thread                    2 or more      4 threads per device      1 thread per device
    ─────────────────────────────────────────────────────────────────────────────────────────
    Engine.detect
      FairBudget.hold: memory, then decode slots
      HostPool.run ───────────► read_volume
      Devices.choose ◄─ Volume ─┘
      DeviceLoop.run
        DeviceWorker.submit ─────────────────► _advance
                                               WorkQueue.add_tiles ────► WorkQueue.take
        FairBudget.release ◄─ show_progress ───┘                         launch_batch
                                                                         collect_batch
        on_progress ◄──────── show_progress ─────────────────────────────_continue
                                               _advance ◄ HostPool.submit ┘
                                               ├─ another pass:
                                               │  WorkQueue.add_tiles ─► WorkQueue.take …
        Waiter.future ◄──────── settle ────────┘
      Detection

The worker has ``show_progress`` and ``settle`` of its ``DeviceLoop`` called on the event loop by
``call_soon_threadsafe``. Deadlines and cancellation act on the event loop; they remove the scan
from the ``WorkQueue``, where all threads meet. On a CPU, the worker hands each batch to one of up
to four threads for passes, and a call comes back. Outside of requests for landmarks,
``Engine.compute`` waits for memory and a slot in the same way, and has a pool of 3 threads; and a
daemon thread per device loads models, one folder at a time: of that, the device worker moves the
weights and runs the self-check, in calls that batches come between.

engine         admission, decoding, models; ``Engine.detect``
admission      bounds on requests in progress, and on their bodies as they arrive
devices        all devices of the process, and which of them runs a request
device_loop    the event loop's side of one device: scans, deadlines, health
device_worker  the thread of one device, which has its networks run
work_queue     what waits for one device: calls, then batches of tiles
active_scans   single flight: one computation per distinct (model, scan, frame), many waiters
scheduler      which tiles form the next batch: the policy, without threads or clocks
batch_sizes    how many tiles a batch may hold, as measured
host_pool      threads for work on the host
metrics        Prometheus metrics
fair_budget    memory and other things that clients share evenly
"""

from app.engine.active_scans import Progress, ignore
from app.engine.admission import CLIENT_SHARE, AdmittedRequest
from app.engine.device_loop import DeviceLoop
from app.engine.engine import DECODE_SLOTS, Engine
from app.engine.fair_budget import FairBudget
from app.engine.metrics import METRICS_MEDIA_TYPE, Metrics
from app.engine.scheduler import BACKGROUND

__all__ = [
    "BACKGROUND", "CLIENT_SHARE", "DECODE_SLOTS", "METRICS_MEDIA_TYPE", "AdmittedRequest",
    "DeviceLoop", "Engine", "FairBudget", "Metrics", "Progress", "ignore",
]  # fmt: skip
