"""One SGLang engine in a process of its own, which obeys JSON lines.

Run as a script: python engine_process.py ARGUMENTS.json COMMANDS_FD ANSWERS_FD
Its standard output is SGLang's log; commands and answers have pipes of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

TRACE_TIMEOUT_S = 30
POLL_S = 0.2


class EngineProcess:
    """An engine and what may be asked of it."""

    def __init__(self, arguments):
        import sglang

        # Its models may still be being written: a folder that exists is whole.
        imported = time.perf_counter()
        while not os.path.exists(arguments["model_path"]):  # noqa: PTH110
            time.sleep(POLL_S)
        self.waited_s = time.perf_counter() - imported
        self._engine = sglang.Engine(**arguments)

    def complete(self, *, prompts, concurrency, sampling, logprobs=False):
        """Complete prompts, a number of them at a time, in order."""
        gate = asyncio.Semaphore(concurrency)

        async def complete_one(prompt):
            async with gate:
                return await self._engine.async_generate(
                    input_ids=prompt,
                    sampling_params=sampling,
                    return_logprob=logprobs,
                    top_logprobs_num=2 if logprobs else 0,
                )

        async def complete_all():
            return await asyncio.gather(*map(complete_one, prompts))

        started = time.perf_counter()
        answers = self._engine.loop.run_until_complete(complete_all())
        seconds = time.perf_counter() - started
        infos = [answer["meta_info"] for answer in answers]
        return {
            "seconds": seconds,
            "outputs": [answer["output_ids"] for answer in answers],
            "verify_ct": sum(info.get("spec_verify_ct") or 0 for info in infos),
            "top_two": [info["output_top_logprobs"][0] for info in infos] if logprobs else None,
        }

    def profile(self, *, prompts, sampling, folder, num_rounds):
        """Trace rounds in which all prompts decode; the scheduler writes the file when they end.

        Python's own calls are left out: noting them would take longer than what they do.
        """
        loop = self._engine.loop
        started = [asyncio.Event() for _ in prompts]

        async def complete_one(prompt, began):
            parts = await self._engine.async_generate(
                input_ids=prompt, sampling_params=sampling, stream=True
            )
            async for _ in parts:
                began.set()

        pairs = zip(prompts, started, strict=True)
        answers = [loop.create_task(complete_one(prompt, began)) for prompt, began in pairs]
        for began in started:
            loop.run_until_complete(began.wait())
        self._engine.start_profile(output_dir=folder, num_steps=num_rounds, with_stack=False)
        loop.run_until_complete(asyncio.gather(*answers))
        if not os.listdir(folder):  # noqa: PTH208  # fewer rounds than were to be traced
            self._engine.stop_profile()
        deadline = time.monotonic() + TRACE_TIMEOUT_S
        while not os.listdir(folder) and time.monotonic() < deadline:  # noqa: PTH208
            time.sleep(0.5)
        return {"files": os.listdir(folder)}  # noqa: PTH208

    def shutdown(self):
        self._engine.shutdown()


def main(arguments_file, commands_fd, answers_fd):
    with open(arguments_file, encoding="utf-8") as file:  # noqa: PTH123
        arguments = json.load(file)
    started = time.perf_counter()
    with os.fdopen(int(commands_fd)) as commands, os.fdopen(int(answers_fd), "w") as answers:

        def answer(record):
            answers.write(json.dumps(record) + "\n")
            answers.flush()

        engine = EngineProcess(arguments)
        answer({"start_s": time.perf_counter() - started - engine.waited_s})
        for line in commands:
            ((command, arguments),) = json.loads(line).items()
            answer({"complete": engine.complete, "profile": engine.profile}[command](**arguments))
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
