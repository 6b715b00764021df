"""A fleet on Ray Serve: the code that carries out the decisions of `saccade.fleet`.

view.py        what a front and the controller tell each other every second
"""
