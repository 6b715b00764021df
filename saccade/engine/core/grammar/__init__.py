"""Grammars: which tokens the output of a request may continue with. Numpy, no torch.

    StructuredOutput -> GrammarCompiler -> GrammarState, one per request -> MaskPool -> token masks -> sampler

llguidance, an optional package, compiles a grammar and computes masks. A mask has one bit per token: bit v % 32 of word v // 32 is
set if token v may come next. Start reading in `grammars.py`, which is what an engine core uses.
"""
