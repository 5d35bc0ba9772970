# SPDX-License-Identifier: Apache-2.0
"""A small engine over the paged cache: requests, scheduling, sampling."""

from __future__ import annotations

from paged_kv.engine.async_llm import AsyncLLM
from paged_kv.engine.config import EngineConfig
from paged_kv.engine.errors import EngineDeadError, EngineGenerateError
from paged_kv.engine.input_batch import InputBatch
from paged_kv.engine.llm import LLM
from paged_kv.engine.llm_engine import LLMEngine
from paged_kv.engine.logprobs import Logprob
from paged_kv.engine.outputs import CompletionOutput, RequestOutput, RequestUpdate
from paged_kv.engine.request import Request, RequestStatus
from paged_kv.engine.sampling_params import SamplingParams
from paged_kv.engine.scheduler import Scheduler
from paged_kv.engine.scheduler_config import SchedulerConfig
from paged_kv.engine.scheduler_output import SchedulerOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineGenerateError",
    "InputBatch",
    "LLMEngine",
    "Logprob",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "RequestUpdate",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
]
