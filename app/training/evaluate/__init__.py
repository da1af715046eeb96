"""Errors of a model on scans with known landmarks, and how they are reported.

===============  ================================================================================
outcomes         runs a model over scans and compares its landmarks with the truth
digits           with how many decimals numbers are written
metrics          accuracy, presence and coverage of 95 % regions
measured         measurements between landmarks against those between the true points
spread           how much the mean error varies over subjects and folds
comparison       which of two versions of a model is better, if that can be told
leakage          which scans a model was trained on
tables           tables for the terminal and CSV files
plots            plots as SVG
report           one HTML page
model_card       sections of a model's README.md that commands write
crossvalidation  pooled outcomes of all folds -> tables, report and model card
===============  ================================================================================
"""
