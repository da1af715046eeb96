"""The plugin for napari: scans and landmarks as layers, and a widget that asks a service.

plugin  what ``napari.yaml`` lists: two readers and the widget

Nothing else imports it but napari, where the extra ``napari`` is installed.
"""
