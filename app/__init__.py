"""landmarkd: finds anatomical landmarks in 3D scans, as a service.

Read the modules in this order; each may import only those before it (see pyproject.toml).

========================  =========================================================================
errors, frames            what all of them speak: the error tree, voxel and world coordinates
settings, schemas         every knob; everything that crosses the wire
point_files               named points -> Slicer Markups
inflate, header, volume   bytes -> Volume
archives                  bytes -> arrays of a network that is not here
folder, manifest          model folder -> Manifest
streams                   arrays of the host -> tensors on a device, beside what it does
grid, tiles               Volume -> Grid -> tile plan
calls, program, module    model folder -> network, without running code of the folder's
network                   tile batch -> Fields (scores and offsets)
votes, readout, heatmaps  Field -> Votes -> Heatmaps
arrays                    arrays of any network -> Field -> Votes, checked
..._numba, ..._loops      the same compiled for the CPU
..._triton, ..._kernels   the same compiled for CUDA
modes, constellation      Heatmaps + Votes -> Modes -> the modes that agree with each other
landmarks                 Modes -> Landmarks: where, whether at all, how sure
vote_files                Votes -> rows, heatmaps as NIfTI
phantom, selfcheck, warm  generated scan; does a network answer as it should; compile ahead
precision                 which precision a network computes in
registry, passes          models that serve; tiles -> a forward pass and its votes
detector                  the device half composed (loading: and checked)
scheduler, batch_sizes    tiles of all requests -> the next batch, and how large it may be
jobs, worklist            who asks for the same scan; what the device does next
batches, device_thread    a batch -> votes, whatever fails; the one thread of a device
aside, tidings            what the host does beside that thread; what it tells the event loop
device_loop, devices      volumes of all requests -> Detections, on one device; on all of them
admission, places, engine what is let in; everything between a request's bytes and its answer
computing                 what is asked for that needs no device
tidying                   memory goes back to the system after work
vote_answers              bytes of a network's output -> its landmarks, or its votes as a file
answers, markups, ...     Landmarks -> JSON, Slicer Markups, fcsv, CSV, TSV
bodies, uploads, events,  HTTP in, progress and answers out;
routes, main              votes_routes for whoever brings their own votes; page for browsers
server, cli               the process, the command; client, offline and demo serve the command
cluster                   the same on many machines, by Ray Serve
========================  =========================================================================
"""
