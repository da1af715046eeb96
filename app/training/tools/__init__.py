"""Scripts, run as ``python -m app.training.tools.NAME``.

=============  =================================================================
make_phantoms  generated scans with landmark files
find_poses     landmark files in a frame of their own -> in that of their scan
=============  =================================================================
"""
