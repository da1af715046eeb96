"""landmarkd: finds anatomical landmarks in 3D scans, as a service.

The packages in the order of the data; each imports only those above it, by the names that its own
``__init__`` lists. pyproject.toml has the contract.

=============  ====================================================================================
errors         the tree of errors, with their HTTP status and code
geometry       voxel and world coordinates
settings       everything that can be configured
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
api            HTTP
server         the process; Ray Serve for several machines
training       trains, evaluates and calibrates models; the service never imports it
cli            the command, and a client
=============  ====================================================================================
"""

import os

# Threads of torch (GNU OpenMP) spin for milliseconds after an operation, in case another follows,
# and take cores from the compiled loops that follow instead. This is a fraction of a millisecond:
# as long as the gaps within a network. It is read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
