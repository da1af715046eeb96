"""The command ``landmarkd``, and a client for Python.

main      the commands of the service: serve, detect, check, models, phantom
outputs   where answers go, and in which format
export    the landmarks of many scans for geometric morphometrics
client    sends scans to a service elsewhere; needs no torch
local     finds landmarks in this process, without a service
napari    the plugin for napari
terminal  what the command says beside its answers
demo      what ``landmarkd serve --demo`` shows
"""

from typing import Final

INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C has ended, as of shells."""
