"""The OpenAPI document is true: a short run of the fuzzer of `stress/fuzz.py`, and what the document says."""

import pytest
from stress.fuzz import fuzz


@pytest.mark.slow
def test_a_short_fuzz_finds_no_server_error_and_no_violation(server):
    num_cases, report, is_clean = fuzz(server.url, examples=3, seed=0, phases="fuzzing")
    assert is_clean, report
    assert num_cases >= 20


def test_the_document_names_the_model_and_every_error(server):
    document = server.http.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        assert {"200", "400", "404", "413", "415", "429", "500", "503", "504"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]
    model = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert model == {"anyOf": [{"const": "tiny", "type": "string"}]}
