"""A Triton Python model in the place of NVIDIA's: it answers with the prompt's letters. It goes by its model's name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.name = config["name"] if config["max_batch_size"] else "llmapi"
        self.outputs = {output["name"]: output for output in config["output"]}

    def execute(self, requests: list[Any]) -> Any:
        answer = {
            "preprocessing": self.preprocess, "postprocessing": self.postprocess, "tensorrt_llm": self.generate,
            "tensorrt_llm_bls": self.generate, "llmapi": self.chat,
        }[self.name]  # fmt: skip
        answers = [answer(request) for request in requests]
        return answers if answers[0] is not None else None

    def preprocess(self, request: Any) -> Any:
        letters = read(request, "QUERY").item()
        if not letters:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no letters"))
        ids = np.frombuffer(letters, np.uint8)
        length = read(request, "REQUEST_OUTPUT_LEN").item()
        return self.respond(INPUT_ID=ids, REQUEST_INPUT_LEN=[len(ids)], REQUEST_OUTPUT_LEN=[length])

    def generate(self, request: Any) -> None:
        ids, count = read(request, "input_ids").reshape(-1), read(request, "request_output_len").item()
        is_stream, sender = bool(read(request, "streaming").item()), request.get_response_sender()
        parts = [ids[i : i + 1] for i in range(count)] if is_stream else [ids[:count]]
        for number, part in enumerate(parts, 1):
            made = number if is_stream else count
            sender.send(
                self.respond(
                    output_ids=part[None],
                    sequence_length=[len(part)],
                    num_input_tokens=[len(ids)],
                    num_output_tokens=[made],
                )
            )
        sender.send(flags=FINAL)

    def postprocess(self, request: Any) -> Any:
        ids = read(request, "TOKENS_BATCH").reshape(-1)[: read(request, "SEQUENCE_LENGTH").item()]
        return self.respond(OUTPUT=[bytes(ids.astype(np.uint8))])

    def chat(self, request: Any) -> None:
        letters, sender = read(request, "text_input").item(), request.get_response_sender()
        count = read(request, "sampling_param_max_tokens").item()
        if not letters:
            error = pb_utils.InferenceResponse(error=pb_utils.TritonError("no letters"))
            return sender.send(error, flags=FINAL)
        ends = range(1, count + 1) if read(request, "streaming").item() else [count]
        for end in ends:  # each response holds the text from its beginning, as NVIDIA's does
            reason = b"length" if end == count else b"None"
            sender.send(self.respond(text_output=[letters[:end]], finish_reason=[reason]))
        return sender.send(flags=FINAL)

    def respond(self, **values: Any) -> Any:
        """All outputs of the model: those given, and zeros."""
        tensors = []
        for name, output in self.outputs.items():
            dtype = pb_utils.triton_string_to_numpy(output["data_type"])
            shape = [max(int(size), 1) for size in output["dims"]]
            value = np.array(values[name] if name in values else np.zeros(shape), dtype=dtype)
            tensors.append(pb_utils.Tensor(name, value if self.name == "llmapi" else value[None]))
        return pb_utils.InferenceResponse(tensors)


def read(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
