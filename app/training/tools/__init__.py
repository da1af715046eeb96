"""Scripts, run as ``python -m app.training.tools.NAME``.

make_phantoms  generated scans with landmark files
"""
