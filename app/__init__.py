"""landmarkd: finds anatomical landmarks in 3D scans, as a service.

The packages in the order of the data; each imports only those above it, by the names that its own
``__init__`` lists. pyproject.toml has the contract.

=============  ====================================================================================
errors         the tree of errors, with their HTTP status and code
durable        files that are there whole or not at all
geometry       voxel and world coordinates
settings       everything that can be configured
measurements   distances, angles and the like of landmarks
report         figures and tables -> an HTML page
io             bytes -> Volume; answers -> JSON, Slicer markups, CSV
compute        devices and their memory, copies to them, threads, Numba
phantom        generated scans whose landmarks are known
shapes         sets of landmarks, without their scans: fits, cohorts, morphometrics
model          model folder -> Network, which gives Fields: scores and offsets
preprocessing  Volume -> Grid -> tiles
voting         Field -> Votes -> Modes -> Landmarks; heatmaps of votes are an output
inference      one scan on one device, from volume to landmarks
engine         many requests on all devices: queues, batches, deadlines, faults
jobs           work that outlives its connection, and the process
api            HTTP
server         the process; Ray Serve for several machines
exchange       model folders from elsewhere, and to others; the service never imports it
training       trains, evaluates and calibrates models; the service never imports it
cli            the command, and a client
=============  ====================================================================================
"""

import os
import sys

# Threads of torch (GNU OpenMP) spin after an operation, in case another follows: for milliseconds,
# in which they take cores from compiled loops; or for a microsecond, if there are more of them than
# cores, and then to wake them takes as long as many an operation. With these it is a tenth of a
# millisecond, and a few microseconds. Four times as long gains nothing on cores of our own, and
# beside another process makes a pass wait for threads that have no core: 154 ms a skull, not 93.
# Both are read when torch is loaded.
if sys.platform == "linux":
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("OMP_WAIT_POLICY", "active")
