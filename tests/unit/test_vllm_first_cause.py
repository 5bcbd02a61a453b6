"""What Tandem says of a vLLM that fails: the error, not which process noticed it."""

from __future__ import annotations

from tandem.engine.vllm.first_cause import first_cause

AT_A_REQUEST = """
(APIServer pid=1) WARNING 11-29 08:36:54 [system_utils.py:255] errors like `OSError: [Errno 24] Too many open files`.
(Worker pid=3) ERROR 11-29 08:37:12 [multiproc_executor.py:1063]     raise AttributeError(
(Worker pid=3) ERROR 11-29 08:37:12 [multiproc_executor.py:1063] AttributeError: '_C' has no attribute 'scan_fwd'
(EngineCore pid=2) ERROR 11-29 08:37:12 [core.py:1512]     raise RuntimeError(
(EngineCore pid=2) ERROR 11-29 08:37:12 [core.py:1512] RuntimeError: Worker failed with error ''_C' has no attribute'
(APIServer pid=1) ERROR 11-29 08:37:12 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore died.
"""
AT_THE_START = """
(Worker pid=3) ERROR 11-29 08:21:43 [multiproc_executor.py:953] AttributeError: 'Lfm2Config' has no 'conv_dim'
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
AT_THE_IMPORT = """
(APIServer pid=1) ERROR 11-29 12:11:29 [registry.py:1120] Error in inspecting model architecture 'Qwen3_5ForCausalLM'
(APIServer pid=1) ERROR 11-29 12:11:29 [registry.py:1120] RuntimeError: Error raised in subprocess:
(APIServer pid=1) ERROR 11-29 12:11:29 [registry.py:1120] ModuleNotFoundError: No module named 'torchvision'
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected. Please check the logs.
"""


def test_of_a_vllm_that_dies_the_worker_s_error_is_told():
    assert first_cause(AT_A_REQUEST) == "AttributeError: '_C' has no attribute 'scan_fwd'"
    assert first_cause(AT_THE_START) == "AttributeError: 'Lfm2Config' has no 'conv_dim'"
    assert first_cause(AT_THE_IMPORT) == "ModuleNotFoundError: No module named 'torchvision'"
    assert first_cause("\n".join(AT_THE_IMPORT.splitlines()[-2:])).startswith("pydantic_core._pydantic_core.Validation")
    assert first_cause(refused := "pydantic.ValidationError: 1 validation error for ModelConfig") == refused


def test_a_log_without_an_error_tells_nothing():
    assert first_cause("(APIServer pid=1) WARNING 11-29 08:36:54 [a.py:1] errors like `OSError: 24`.\nready\n") == ""


def test_of_several_causes_the_last_is_told():
    assert first_cause("ValueError: the first\n  at a line\ntorch.OutOfMemoryError: the second\n") == (
        "torch.OutOfMemoryError: the second"
    )
