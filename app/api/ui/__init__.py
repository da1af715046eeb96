"""The page for browsers.

page      its routes, and the interactive documentation
phantoms  the scans that it generates
web/      its HTML, CSS and JavaScript
"""
