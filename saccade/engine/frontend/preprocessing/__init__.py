"""Preprocess conversations into prompts, outside the engine's thread.

    submit -> tokenise (text worker) -------------------------------------------------------> assemble -> TokenPrompt
          \\-> read, hash, look up (reader thread) -> decode, resize, patchify (image workers) -/

Start with `preprocessor.py`. `processed_images.py` preprocesses each image once, through `backends.py`, which runs
`jobs.py` in worker processes. `worker.py` is the loop of such a process, and `prompt_processor.py` is the work it does.
"""
