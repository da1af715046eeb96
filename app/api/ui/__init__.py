"""The page for browsers: ``page`` has its routes, ``web/`` its HTML, CSS and JavaScript."""
