"""Vision towers: what every tower does (`tower.py`), and two of them.

    patch_tower.py, patch_layout.py   grids of patches of any size: Qwen-VL
    tile_tower.py, tile_layout.py     squares of one size: CLIP and SigLIP, as LLaVA uses them

A layout says on the host which packed rows attend to each other and which of them each image token is made of.
"""
