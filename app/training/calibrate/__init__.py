"""95 % regions and presence thresholds of a model, from scans that it was not trained on.

================  ===============================================================================
synthetic_crops   halves of scans, and blank scans
calibration_runs  a model on a scan, its halves and blank scans
regions           held-out errors -> conformal 95 % regions
thresholds        masses of present and absent landmarks -> presence thresholds
calibration       regions and thresholds of a model -> its model.toml and model card
================  ===============================================================================
"""
