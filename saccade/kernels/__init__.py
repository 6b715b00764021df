"""The operations training and serving share, one file each: contract, reference, fast path, public function.

Start with `attention.py`. Every public function takes and returns packed rows (DESIGN: nothing is padded) and looks only at
shapes, dtypes and strides, never at values. `launch.py` decides which implementation runs.
"""
