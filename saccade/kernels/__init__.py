"""The operations training and serving share, one file each: contract, reference, fast path, public function.

Start with `rms_norm.py`, the smallest with everything a kernel module has; then `attention.py`. Every public function takes and
returns packed rows (nothing is padded) and looks only at shapes, dtypes and strides, never at values. `launch.py` decides which
implementation runs. Only this room imports Triton.
"""
