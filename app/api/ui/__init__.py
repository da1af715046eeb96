"""The page for browsers.

page      its routes, and the interactive documentation
web/      its HTML, CSS and JavaScript
"""
