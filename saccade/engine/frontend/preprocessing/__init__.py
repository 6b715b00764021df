"""Preprocess conversations into prompts, outside the engine's thread.

    submit -> tokenise (text worker) -----------------------------------------------------------> assemble -> TokenPrompt
          \\-> read, hash, look up (reader thread) -> decode, resize, patchify (image workers) -/

Start with `preprocessor.py`. `processed_images.py` preprocesses each image once; `backends.py` runs the jobs in worker processes, whose
side is `worker.py` and whose work is `prompt_processor.py`.
"""
