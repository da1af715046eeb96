"""Calls that take a scan: one way to receive it, and what is made of it.

reception  checks the head of a request, and receives its scan within the engine's bounds
landmarks  POST /v1/landmarks, which may answer a DICOM structured report
heatmaps   POST /v1/heatmaps
jobs       /v1/jobs: the landmarks of scans, later
uploads    /v1/uploads: files of jobs in parts, over several connections
"""
