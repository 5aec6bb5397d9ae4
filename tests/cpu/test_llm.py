"""`LLM` with the scripted model: every token, text and count is known beforehand."""

from __future__ import annotations

import inspect
import logging
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from scripted import (
    EOS,
    VOCAB_SIZE,
    ScriptedModel,
    byte_tokenizer,
    fake_loaded,
    hash_script,
    list_script,
    noise_script,
)

from subten.config import EngineConfig
from subten.core import (
    ConfigError,
    FinishReason,
    OverloadError,
    RequestError,
    SamplingParams,
    UserError,
)
from subten.engine.llm import LLM
from subten.weights.load import LoadedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def scripted_llm(script: Any = hash_script, *, template: str | None = None, **settings: Any) -> LLM:
    return LLM(
        fake_loaded(ScriptedModel(script), tokenizer=byte_tokenizer(chat_template=template)),
        **settings,
    )


def says(prompt: str, num_tokens: int = 10) -> list[int]:
    tokens = list(byte_tokenizer().encode(prompt))
    for _ in range(num_tokens):
        tokens.append(hash_script(tuple(tokens)))
    return tokens[-num_tokens:]


def test_keywords_are_the_fields_of_engine_config() -> None:
    parameters = dict(inspect.signature(LLM.__init__).parameters)
    for name in ("self", "model", "progress"):
        del parameters[name]
    defaults = {f.name: f.default for f in fields(EngineConfig) if f.default is not MISSING}
    assert {name: p.default for name, p in parameters.items()} == defaults
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())


def test_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="kv_cache_type"):
        LLM(fake_loaded(), kv_cache_type="int4")


def test_completions_come_in_order_whatever_the_prompts_are() -> None:
    llm = scripted_llm()
    ids = tuple(b"third")
    completions = llm.generate(["first", list(b"second"), ids], GREEDY)
    assert [c.token_ids for c in completions] == [
        tuple(says(prompt)) for prompt in ("first", "second", "third")
    ]
    assert [c.prompt_token_ids for c in completions] == [tuple(b"first"), tuple(b"second"), ids]
    assert all(c.text == bytes(c.token_ids).decode() for c in completions)
    assert [len(llm.generate(one, GREEDY)) for one in ("first", list(ids), ids, [ids])] == [1] * 4


def test_each_prompt_can_have_its_own_parameters() -> None:
    completions = scripted_llm().generate(
        ["a", "b"], [SamplingParams(max_tokens=n, temperature=0.0) for n in (3, 5)]
    )
    assert [c.usage.completion_tokens for c in completions] == [3, 5]
    assert [c.finish_reason for c in completions] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", r"prompts\[0\]: got an empty text"),
        ([], "prompts: got none"),
        (["a", ""], r"prompts\[1\]: got an empty text"),
        ([[]], r"prompts\[0\]: got an empty prompt"),
        ([1, 2, 320], r"prompts\[0\]\[2\]: got 320; allowed: a token id from 0 to 319"),
        ([1, -1], r"prompts\[0\]\[1\]: got -1"),
        ([[1, 2.0]], r"prompts\[0\]\[1\]: got 2.0"),
        ([[True]], r"prompts\[0\]\[0\]: got True"),
        (["a", [1, "b"]], r"prompts\[1\]\[1\]: got 'b'"),
        ([None], r"prompts\[0\]: got 'NoneType'"),
        (3, "prompts: got 'int'"),
        (b"bytes", "prompts: got 'bytes'"),
        (["ok", "x" * 300], r"prompts\[1\]: got 300 tokens; allowed: 1 to 255"),
    ],
)
def test_bad_prompt_is_named_and_nothing_starts(prompts: Any, message: str) -> None:
    llm = scripted_llm(max_model_len=256)
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, GREEDY)
    assert "\n" not in str(caught.value)
    assert llm.engine.stats.num_accepted == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "got 1 for 2 prompts"),
        ([GREEDY] * 3, "got 3 for 2 prompts"),
        ({"max_tokens": 3}, "sampling_params: got 'dict'"),
        (SamplingParams(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids: got 320"),
    ],
)
def test_bad_parameters_are_named(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        scripted_llm().generate(["a", "b"], params)


def test_stream_refuses_at_the_call() -> None:
    with pytest.raises(RequestError, match="prompt: got an empty text"):
        scripted_llm().stream("")
    with pytest.raises(RequestError, match="sampling_params: got 'dict'"):
        scripted_llm().stream("a", {"max_tokens": 1})


def test_room_that_is_used_up_ends_with_length() -> None:
    (completion,) = scripted_llm(max_model_len=20).generate("x" * 15, SamplingParams(max_tokens=99))
    assert completion.usage.total_tokens == 20
    assert completion.finish_reason is FinishReason.LENGTH


# Cases A01 and A03: streamed and not, the same text, and nothing of the stop in it.
@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        ([*b"the ", 260, *b" ", 258, *b" f", 259, *b" jumps"], ("own fox",), "the br "),
        ([*"gene \U0001f9ec edit".encode()], ("\U0001f9ec",), "gene "),
        ([*b"ab", *b"cd"], ("bcd", "c"), "ab"),
        ([*b"abc"], ("a",), ""),
        ([257, 258], ("zzz",), " theown"),
    ],
)
def test_stop_string_over_tokens(pieces: list[int], stop: tuple[str, ...], text: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, stop=stop)
    llm = scripted_llm(list_script({"go": pieces}))
    (whole,) = llm.generate("go", params)
    chunks = list(llm.stream("go", params))
    assert whole.text == text
    assert "".join(chunk.text for chunk in chunks) == text
    assert whole.finish_reason is chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.token_ids == whole.token_ids
    assert [chunk.token_id for chunk in chunks] == list(whole.token_ids)
    assert all(chunk.completion is None for chunk in chunks[:-1])


def test_end_token_is_counted_and_not_shown() -> None:
    (completion,) = scripted_llm(list_script({"go": [*b"hi"]})).generate("go", GREEDY)
    assert completion.text == "hi"
    assert completion.token_ids == (*b"hi", EOS)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage.completion_tokens == 3


def test_characters_split_over_tokens_stream_whole() -> None:
    text = "d\u010f \U0001f44b\U0001f3fd \ud55c\uae00"
    llm = scripted_llm(list_script({"go": [*text.encode()]}))
    chunks = list(llm.stream("go", SamplingParams(temperature=0.0, max_tokens=99)))
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)


# Case P03: a hundred tokens whose text would encode to fewer.
def test_usage_counts_ids_not_text() -> None:
    llm = scripted_llm(list_script({"go": [258] * 100}))
    (completion,) = llm.generate("go", SamplingParams(temperature=0.0, max_tokens=100))
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 100, 102)
    assert completion.text == "own" * 100
    assert len(completion.timings.itl_ms) == 99
    assert completion.tpot_ms == pytest.approx(sum(completion.timings.itl_ms) / 99)
    assert completion.ttft_ms is not None
    assert completion.ttft_ms > 0


# Case K16: 16 tokens of prompt, 200 decoded one by one.
def test_kv_bytes_are_those_of_the_pages_held() -> None:
    llm = scripted_llm()
    (completion,) = llm.generate("x" * 16, SamplingParams(temperature=0.0, max_tokens=201))
    # 216 tokens have keys and values: the last token never needed them.
    assert completion.kv_bytes == 4 * 512
    assert completion.kv_true_bits == pytest.approx(4 * 512 * 8 / (216 * 2 * 2))
    assert completion.kv_full_page_bits == 512 * 8 / (64 * 2 * 2)
    assert completion.kv_cache_dtype == "bf16"


def test_chat_finds_the_pages_of_earlier_turns() -> None:
    llm = scripted_llm(template=TEMPLATE)
    messages = [{"role": "user", "content": "tell me something long " * 4}]
    first = llm.chat(messages, GREEDY)
    assert first.usage.cached_tokens == 0
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and then?"},
    ]
    chunks = list(llm.chat_stream(messages, GREEDY))
    second = chunks[-1].completion
    assert second is not None
    assert second.usage.cached_tokens >= 64
    uncached = scripted_llm(template=TEMPLATE, enable_prefix_caching=False)
    assert uncached.chat(messages, GREEDY).token_ids == second.token_ids
    assert "".join(chunk.text for chunk in chunks) == second.text


def test_chat_needs_messages_and_a_template() -> None:
    with pytest.raises(RequestError, match="messages: got none"):
        scripted_llm(template=TEMPLATE).chat([])
    with pytest.raises(RequestError, match="no chat template"):
        scripted_llm().chat([{"role": "user", "content": "hi"}])


def test_model_without_tokenizer_takes_ids_and_refuses_text() -> None:
    loaded = fake_loaded()
    llm = LLM(
        LoadedModel(
            model=loaded.model,
            config=loaded.config,
            tokenizer=None,
            name="ids",
            weight_bytes=0,
            dtype=torch.float32,
        )
    )
    (completion,) = llm.generate([1, 2, 3], GREEDY)
    assert completion.text == ""
    assert completion.usage.completion_tokens == 10
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match=r"stop: .*no tokenizer"):
        llm.generate([1], SamplingParams(stop=("a",)))


def test_closing_a_stream_cancels_its_request() -> None:
    llm = scripted_llm()
    stream = llm.stream("hello", GREEDY)
    next(stream)
    assert llm.engine.scheduler.allocator.num_used > 0
    stream.close()
    assert llm.engine.scheduler.allocator.num_used == 0
    assert llm.engine.stats.num_ended[FinishReason.CANCELLED] == 1
    assert llm.generate("world", GREEDY)[0].token_ids == tuple(says("world"))


def test_interrupt_leaves_nothing_running() -> None:
    llm = scripted_llm()
    llm.loaded.model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    assert not llm.engine.scheduler.has_work
    llm.engine.scheduler.check_integrity()
    llm.loaded.model.error = None
    assert llm.generate("a", GREEDY)[0].token_ids == tuple(says("a"))


def test_open_streams_and_generate_share_the_engine() -> None:
    llm = scripted_llm()
    one, two = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    seen: dict[str, list[int | None]] = {"one": [], "two": []}
    for _ in range(3):
        seen["one"].append(next(one).token_id)
        seen["two"].append(next(two).token_id)
    assert llm.generate("three", GREEDY)[0].token_ids == tuple(says("three"))
    seen["one"].extend(chunk.token_id for chunk in one)
    seen["two"].extend(chunk.token_id for chunk in two)
    assert seen == {"one": says("one"), "two": says("two")}


def test_failed_request_is_reported_beside_the_others() -> None:
    llm = scripted_llm()
    llm.loaded.model.poisoned_token = ord("!")
    good, bad = llm.generate(["good", "bad!"], GREEDY)
    assert bad.finish_reason is FinishReason.ERROR
    assert "NaN" in bad.finish_detail
    assert bad.token_ids == ()
    assert (bad.ttft_ms, bad.tpot_ms) == (None, None)
    assert good.token_ids == tuple(says("good"))


def test_logprobs_come_with_chunks_and_completions() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    llm = scripted_llm()
    chunks = list(llm.stream("abc", params))
    completion = chunks[-1].completion
    assert completion is not None and completion.logprobs is not None
    assert [chunk.logprobs for chunk in chunks] == list(completion.logprobs)
    assert [told.token_id for told in completion.logprobs] == list(completion.token_ids)
    assert completion.prompt_logprobs is not None
    told = [logprobs.token_id for logprobs in completion.prompt_logprobs]
    assert told == list(completion.prompt_token_ids[1:])
    (plain,) = llm.generate("abc", GREEDY)
    assert plain.logprobs is None and plain.prompt_logprobs is None


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {VOCAB_SIZE: 1}}, {"allowed_token_ids": (VOCAB_SIZE,)}],
)
def test_ids_that_no_token_has_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(params))}: got {VOCAB_SIZE}"):
        scripted_llm().generate("abc", SamplingParams(**params))


def test_full_queue_refuses_and_leaves_nothing_behind() -> None:
    llm = scripted_llm(max_num_seqs=1, max_queue=2)
    with pytest.raises(OverloadError, match="allowed: 2"):
        llm.generate(["a", "b", "c"], GREEDY)
    completions = llm.generate(["a", "b"], GREEDY)
    assert [c.token_ids for c in completions] == [tuple(says("a")), tuple(says("b"))]
    assert llm.engine.scheduler.allocator.num_used == 0


def test_least_length_holds_for_stop_strings_too() -> None:
    llm = scripted_llm(list_script({"a": [120, 121, 120, 121, 122]}))
    params = {"temperature": 0.0, "stop": ("xy",)}
    (stopped,) = llm.generate("a", SamplingParams(**params))
    (held,) = llm.generate("a", SamplingParams(**params, min_tokens=2))
    assert (stopped.text, held.text) == ("", "xy")


def test_instances_are_independent() -> None:
    first, second = scripted_llm(), scripted_llm(list_script({"go": [*b"other"]}))
    streams = [first.stream("go", GREEDY), second.stream("go", GREEDY)]
    texts = ["", ""]
    for pair in zip(*streams, strict=False):
        texts = [text + chunk.text for text, chunk in zip(texts, pair, strict=True)]
    assert texts[1] == "other"
    assert bytes(says("go")).decode().startswith(texts[0])
    second.close()
    assert first.generate("go", GREEDY)[0].token_ids == tuple(says("go"))


def test_closed_instance_says_so() -> None:
    with scripted_llm() as llm:
        stream = llm.stream("hello", GREEDY)
        next(stream)
    with pytest.raises(UserError, match="LLM: closed"):
        next(stream)
    with pytest.raises(UserError, match="LLM: closed"):
        llm.generate("hello", GREEDY)
    llm.close()
    with pytest.raises(UserError, match="LLM: closed"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_engine_seed_serves_requests_without_one() -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        completions = scripted_llm(noise_script, seed=seed).generate(["same"] * 2, params)
        return [completion.token_ids for completion in completions]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1)[0] != run(1)[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len: got 5000; allowed: 1 to 4096"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens: got 63; allowed: at least"),
        ({"cpu_kv_cache_bytes": 511}, "cpu_kv_cache_bytes: got 511; allowed: at least 512"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: got 'int4'; allowed: bf16, for which"),
        ({"dtype": "bfloat16"}, "dtype: got 'bfloat16'; allowed: float32, for which"),
        ({"device": "cuda"}, "device: got 'cuda'; allowed: cpu"),
        ({"backend": "triton"}, "backend: got 'triton'; allowed: torch, for which"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(fake_loaded(), **settings)


def test_unknown_model_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(UserError, match="no folder or file here"):
        LLM("./no-such-model", device="cpu")


# Case S01: the model's own context is lowered to what the pool holds, aloud.
def test_context_beyond_the_pool_is_lowered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="subten"):
        llm = scripted_llm(num_pages=2)
    assert llm.max_model_len == 128
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["max_model_len: 4096 lowered to 128, all that 2 pages hold"]
    for name in ("device", "dtype", "backend", "num_pages"):
        assert sum(r.getMessage().startswith(f"{name}: ") for r in caplog.records) == 1, name
    with pytest.raises(RequestError, match="got 200 tokens; allowed: 1 to 127"):
        llm.generate("x" * 200, GREEDY)
    assert len(llm.generate(["y" * 10] * 10, GREEDY)) == 10


# The largest length that fits is the one that the refusal names.
@pytest.mark.parametrize("pool", [{"num_pages": 2}, {"cpu_kv_cache_bytes": 2 * 512 + 511}])
def test_context_asked_for_beyond_the_pool_is_refused(pool: dict[str, int]) -> None:
    for length in (129, 4096):
        with pytest.raises(ConfigError) as caught:
            scripted_llm(max_model_len=length, **pool)
        allowed = "1 to 128, all that 2 pages hold"
        assert str(caught.value) == f"max_model_len: got {length}; allowed: {allowed}"
    assert scripted_llm(max_model_len=128, **pool).max_model_len == 128


def test_pool_is_sized_from_memory_and_never_beyond_use() -> None:
    assert scripted_llm(cpu_kv_cache_bytes=5 * 512 + 511).pool.num_pages == 5
    # Two sequences of at most 100 tokens need two pages each.
    assert scripted_llm(max_num_seqs=2, max_model_len=100).pool.num_pages == 4
