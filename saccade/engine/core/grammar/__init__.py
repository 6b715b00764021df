"""Grammars restrict the next token of a request's output. Numpy, no torch.

    StructuredOutput -> GrammarCompiler -> GrammarState, one per request -> MaskPool -> token masks -> sampler

llguidance, an optional package, compiles grammars and computes masks. A mask has one bit per token: bit v % 32 of word
v // 32 is set if token v may come next. Start with `grammars.py`, which the engine core uses.
"""
