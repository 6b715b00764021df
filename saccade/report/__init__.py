"""Write reports as self-contained HTML pages: `page.py` has the page, its tables and images, `charts.py` draws SVG.

A page has no scripts and loads nothing; its content security policy forbids both. Functions escape the text that they
are given and return `Html`.
"""
