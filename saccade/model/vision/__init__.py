"""Vision towers: what every tower does (`tower.py`), and two of them.

    patch_tower.py, patch_layout.py   grids of patches of any size
    tile_tower.py, tile_layout.py     squares of one size, as CLIP and SigLIP have them

A layout says on the host which packed rows attend to each other and which of them each image token is made of.
"""
