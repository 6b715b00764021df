"""Operations shared by training and serving, one file each: specification, reference, fast path, public function.

Start with `rms_norm.py`, the smallest complete kernel module; then `attention.py`. Public functions take packed tensors
(nothing is padded) and check only shapes, dtypes and strides, never values. `launch.py` chooses the implementation.
Only this package imports Triton.
"""
