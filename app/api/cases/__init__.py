"""Corrected cases that are kept, to be learned from.

store   the folder: whole cases, whatever happens
routes  ``/v1/cases``: keep, list, delete
"""

from app.api.cases.routes import cases_router
from app.api.cases.store import CaseStore

__all__ = ["CaseStore", "cases_router"]
